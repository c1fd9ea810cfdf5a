"""The machines of a group. What this one offers: an address that others can reach (`rdzv_endpoint`, IPv4 only), the
packages that a plan needs, limits of its environment. How others come in: they connect to the Gate, are checked, and
get a rank range and a rendezvous store."""

import array
import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import math
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from ..accelerators import KERNELS
from ..errors import Cause, ProtocolError, Refused, WorkerStartError, quoted, say
from ..planning.candidates import default_plan
from ..planning.run_plan import PlanInputs, RunPlan
from ..request import parse_devices
from ..specs import Placement
from ..wire.channel import TcpChannel, prove, read_key
from ..wire.messages import Denied, Ended, Invitation, Machine
from .torchrun import GRACE_SECONDS, PACKAGE, Rendezvous

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40
MAX_ADDRESSES = 1024
END_REPORT_SECONDS = 1.5
STORE_SECONDS = 600
MAX_UNPROVEN = 16  # connections that have not proved the token yet
PAUSE_SECONDS = 0.2  # after a failed accept, as when this process has no descriptors left

log = logging.getLogger(__name__)
_warn_once = functools.cache(log.warning)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns the host and the port as written. Raises Refused."""
    if not endpoint.strip():
        raise Refused("endpoint.missing", widget="rdzv_endpoint")
    host, _, port = endpoint.strip().rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise Refused("endpoint.port", widget="rdzv_endpoint", endpoint=quoted(endpoint))
    return host, int(port)


def check_endpoint(endpoint: str) -> None:
    """Raises Refused for an address that no interface of this machine has; a host name is resolved by the workers."""
    host, _ = split_endpoint(endpoint)
    try:
        socket.inet_aton(host)
    except (OSError, ValueError):
        return
    interface_of(parse_endpoint(endpoint)[0])


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Returns the address and the port. Resolving a name may take seconds. Raises Refused."""
    host, port = split_endpoint(endpoint)
    try:
        address = socket.gethostbyname(host)
    except (OSError, ValueError):
        raise Refused("endpoint.name", widget="rdzv_endpoint", host=quoted(host)) from None
    if address == "0.0.0.0":
        raise Refused("endpoint.every", widget="rdzv_endpoint")
    return address, port


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at this address only; port 0 for any. Raises Refused."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, port))
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRNOTAVAIL:
            has = sorted(addresses())
            raise Refused("endpoint.address", widget="rdzv_endpoint", address=address, addresses=has) from None
        reason = error.strerror
        raise Refused("endpoint.taken", "rdzv_endpoint", address=address, port=port, error=reason) from None
    server.listen()
    return server


def interface_of(address: str) -> str:
    """Returns the network interface that has `address`. Raises Refused."""
    if address.startswith("127."):
        return "lo"
    interfaces = addresses()
    if address not in interfaces:
        raise Refused("endpoint.interface", widget="rdzv_endpoint", address=address, addresses=sorted(interfaces))
    return interfaces[address]


def addresses() -> dict[str, str]:
    """Returns the network interface of each address of this machine; an interface may have several."""
    found = array.array("B", bytes(MAX_ADDRESSES * IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFCONF, struct.pack("iP", len(found), found.buffer_info()[0]))
    size = struct.unpack("iP", answer)[0]
    entries = (found[start : start + IFREQ_BYTES].tobytes() for start in range(0, size, IFREQ_BYTES))
    return {socket.inet_ntoa(entry[20:24]): entry[:16].split(b"\0")[0].decode() for entry in entries}


def checked_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the plan as far as it needs no sizes. Raises Refused where it cannot run here: other machines could not
    reach this one, the shared token is missing, or a package is."""
    request = inputs.request
    if request.nnodes > 1:
        check_endpoint(request.rdzv_endpoint)
        read_key()
    plan = default_plan(inputs)
    kernel = KERNELS.get(request.options.attention_backend)
    if kernel and not kernel.installed:
        fix, package = {"attention_backend": "auto"}, kernel.package
        raise Refused("backend.package", "attention_backend", fix, backend=kernel.name, package=package)
    return plan


def seconds_from(variable: str, default: float) -> float:
    """Returns a limit of the environment, or with a warning the default; 0 is allowed where it is the default."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    number = _number(text)
    if number is not None and (number or not default):
        return number
    log.warning("[CP] %s=%r is not a valid number of seconds; using %g", variable, text, default)
    return default


def limits_by_worker(variable: str, unit: str, workers: int) -> tuple[float, ...]:
    """Returns one limit a worker, infinite for 0, from an environment variable; the least for all where there are not
    as many numbers as workers. () without limits, or with a warning for an invalid number."""
    text = os.environ.get(variable, "").strip()
    numbers = [_number(one) for one in text.split(",")] if text else []
    if None in numbers:
        _warn_once("[CP] %s=%r is not a %s; it is ignored", variable, text, unit)  # it is read several times a run
        return ()
    known = [number or math.inf for number in numbers]
    each = known if len(known) == workers else [min(known, default=math.inf)] * workers
    return tuple(each) if min(each) < math.inf else ()


def _number(text: str) -> float | None:
    """Returns a finite number of at least 0, or None."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if math.isfinite(number) and number >= 0:
            return number
    return None


class RemoteMachine:
    """A machine that has joined, with Torchrun's interface. Its connection is silent until its torchrun ends."""

    def __init__(self, control: TcpChannel, devices: tuple[str, ...], comfyui: str) -> None:
        self.machine = control.addresses[1]
        self.devices = devices
        self.control = control
        self._ended: Ended | None = None
        self.comfyui = comfyui  # its folder there, "" for the same as here

    def running(self) -> bool:
        return self._ended is None and not self.control.waiting()

    def ended(self, seconds: float = 0.0) -> Ended | None:
        """Returns how its workers ended, once its torchrun has; None if it reports nothing within this many seconds."""
        if self._ended is None and self.control.waiting(seconds):
            self._ended = Ended()
            with contextlib.suppress(EOFError, ProtocolError):
                message, _ = self.control.receive()
                self._ended = message if isinstance(message, Ended) else self._ended
        return self._ended

    def cause_of_death(self, rank: int) -> Cause:
        causes = (self.ended(END_REPORT_SECONDS) or Ended()).causes
        return next((cause for cause in causes if cause.rank == rank), Cause(kind="gone", rank=rank))

    def last_line(self) -> str:
        return (self._ended or Ended()).last_line


class Cluster:
    """Accepts the group's other machines at `placement.rdzv_endpoint`, for the lifetime of the group."""

    def __init__(self, placement: Placement, group_token: str) -> None:
        self._placement = placement
        # what the other machines run
        self._command = f"python -m parallel_runtime join {placement.rdzv_endpoint} --token-file FILE"
        key = read_key()
        self._group_token = group_token
        self._address, port = parse_endpoint(placement.rdzv_endpoint)
        interface = interface_of(self._address)
        self.machines: list[RemoteMachine] = []
        # The store's socket is bound here, so that its port is known before a machine is invited.
        meeting = listen(self._address, 0)
        self._store_port = meeting.getsockname()[1]
        timeout = timedelta(seconds=STORE_SECONDS)
        self._store: TCPStore | None = TCPStore(
            self._address, self._store_port, None, True, timeout, False, master_listen_fd=meeting.detach()
        )
        store = f"{self._address}:{self._store_port}"
        self.meeting = Rendezvous(store=store, machines=placement.nnodes, interface=interface)
        self.gate = Gate(self._address, port, key)  # last: the store exists, and nothing can fail any more

    def wait_for_machines(self, deadline: float, watch: Callable[[], None]) -> None:
        """Waits until every machine has joined, and calls `watch`, which may raise. Raises WorkerStartError."""
        missing = self._placement.nnodes - 1
        log.info(
            "[CP] waiting at %s for %d other machine(s); on each run: %s",
            self._placement.rdzv_endpoint, missing, self._command,
        )  # fmt: skip
        if self._address.startswith("127."):
            has = ", ".join(address for address in sorted(addresses()) if not address.startswith("127.")) or "none"
            log.warning(
                "[CP] no other machine can reach %s, which is this machine's loopback; its other addresses: %s",
                self._address, has,
            )  # fmt: skip
        while len(self.machines) < missing:
            watch()
            if time.monotonic() > deadline:
                joined = [machine.machine for machine in self.machines]
                values = {"count": 1 + len(joined), "machines": self._placement.nnodes, "others": joined or "-"}
                raise WorkerStartError(say("start.machines", **values, command=self._command))
            self.machines = [machine for machine in self.machines if machine.running()]
            with contextlib.suppress(queue.Empty):
                self._admit(self.gate.arrivals.get(timeout=0.1))
        for index, machine in enumerate(self.machines, start=1):
            workers, nnodes, store = len(machine.devices), self._placement.nnodes, self._store_port
            invitation = Invitation(index=index, nnodes=nnodes, workers=workers, store=store, token=self._group_token)
            with contextlib.suppress(OSError):  # a machine that left meanwhile is named by the check of the start
                machine.control.send(invitation)

    def close(self) -> None:
        for machine in self.machines:
            machine.control.close()
        self.gate.close()
        self._store = None

    def _admit(self, channel: TcpChannel) -> None:
        """Adds a machine that fits; one that does not ends the start, with the reason on both sides."""
        offer = channel.greeting(Machine, GRACE_SECONDS)
        if offer is None:  # such as a rank of an earlier group
            channel.close()
            return
        name = channel.addresses[1]
        try:
            if pairs := version_mismatches(offer.versions):
                other, own = zip(*pairs, strict=True)
                raise Refused("machine.versions", theirs=list(other), ours=list(own))
            local = self._placement.devices
            devices = parse_devices(offer.devices or ",".join(local), offer.gpus)
            if len(devices) != len(local) or (devices[0] == "cpu") != (local[0] == "cpu"):
                raise Refused("machine.devices", devices=", ".join(devices), ours=", ".join(local))
        except Refused as refused:
            with contextlib.suppress(OSError):
                channel.send(Denied(str(refused)))
            channel.close()
            raise WorkerStartError(say("start.machine", machine=name, reason=refused.sentence)) from None
        log.info("[CP] %s has joined with %s", name, ", ".join(devices))
        self.machines.append(RemoteMachine(channel, devices, offer.comfyui))


class Gate:
    """Accepts connections of other machines and their ranks at the address that the user named. Those that prove the
    token are put into `arrivals`; others are closed, and logged. Beyond MAX_UNPROVEN pending connections the oldest is
    closed, so that strangers cannot keep out a machine with the token."""

    def __init__(self, address: str, port: int, key: str) -> None:
        self.arrivals: queue.SimpleQueue[TcpChannel] = queue.SimpleQueue()
        self._key = key
        self._closing = threading.Event()
        self._refused: set[str] = set()
        self._unproven: list[socket.socket] = []  # oldest first
        self._lock = threading.Lock()  # of that list
        self._server = listen(address, port)
        self._thread = threading.Thread(target=self._listen, name="gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        self._hang_up_beyond(0)
        with contextlib.suppress(queue.Empty):
            while True:
                self.arrivals.get_nowait().close()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                sock, (address, _) = self._server.accept()
            except OSError as error:
                if not self._closing.wait(PAUSE_SECONDS):
                    self._refuse("a connection", f"it cannot be accepted ({error.strerror})")
                continue
            with self._lock:
                self._unproven.append(sock)
            self._hang_up_beyond(MAX_UNPROVEN)
            threading.Thread(target=self._admit, args=(sock, address), daemon=True).start()

    def _hang_up_beyond(self, count: int) -> None:
        """Keeps the last `count` unproven connections, and shuts down the others: their threads see the end."""
        with self._lock:
            for sock in self._unproven[: max(0, len(self._unproven) - count)]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                self._unproven.remove(sock)

    def _admit(self, sock: socket.socket, address: str) -> None:
        channel, reason = None, "its token differs from this machine's"
        try:
            if prove(sock, self._key, host=True):
                channel = TcpChannel(sock)
        except (OSError, EOFError):
            reason = "it showed no token"
        with self._lock:
            if sock in self._unproven:  # else it was hung up on meanwhile
                self._unproven.remove(sock)
                if channel is not None:
                    self.arrivals.put(channel)
                    return
        if channel is None:
            self._refuse(address, reason)
        sock.close()

    def _refuse(self, address: str, reason: str) -> None:
        """Logs a refusal once an address: it may retry every second."""
        if address not in self._refused:
            log.warning("[CP] %s was refused: %s", address, reason)
        self._refused.add(address)


@functools.cache
def versions() -> tuple[str, ...]:
    """Returns the versions that all machines must share, by name; PyTorch's with its build, which pip may not show."""
    digest, python = hashlib.sha256(), sys.version_info
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    ours = f"CP Sampler {digest.hexdigest()[:8]}"
    return ours, f"Python {python.major}.{python.minor}", f"PyTorch {torch.__version__}"


def version_mismatches(other_versions: tuple[str, ...]) -> list[tuple[str, str]]:
    """Returns the pairs of versions, the other machine's and this one's, that differ."""
    return [(other, local) for other, local in zip(other_versions, versions(), strict=False) if other != local]
