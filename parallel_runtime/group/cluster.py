"""The other machines of a group: they connect to the Gate, are checked, and get a rank range and a rendezvous store."""

import contextlib
import functools
import hashlib
import logging
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from ..errors import Cause, ProtocolError, Refused, WorkerStartError, say
from ..request import parse_devices
from ..specs import ComfySetup, Placement
from ..wire.channel import TcpChannel, prove, read_key
from ..wire.messages import Denied, Ended, Invitation, Machine
from .this_machine import addresses, interface_of, listen, parse_endpoint
from .torchrun import GRACE_SECONDS, PACKAGE, Rendezvous

END_REPORT_SECONDS = 1.5
STORE_SECONDS = 600
MAX_UNPROVEN = 16  # connections that have not proved the token yet
PAUSE_SECONDS = 0.2  # after a failed accept, as when this process has no descriptors left

log = logging.getLogger(__name__)


class RemoteMachine:
    """A machine that has joined, with Torchrun's interface. Its connection is silent until its torchrun ends."""

    def __init__(self, control: TcpChannel, devices: tuple[str, ...], comfyui: str) -> None:
        self.machine = control.addresses[1]
        self.devices = devices
        self.control = control
        self._ended: Ended | None = None
        self._comfyui = comfyui

    def comfy(self, setup: ComfySetup | None) -> ComfySetup | None:
        """Returns the setup with the folder of ComfyUI on that machine."""
        if setup is None or not self._comfyui:
            return setup
        return replace(setup, root=self._comfyui, folder=self._comfyui)

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
        key = read_key()
        self._group_token = group_token
        self._address, port = parse_endpoint(placement.rdzv_endpoint)
        self._interface = interface_of(self._address)
        self.machines: list[RemoteMachine] = []
        # The store's socket is bound here, so that its port is known before a machine is invited.
        meeting = listen(self._address, 0)
        self._store_port = meeting.getsockname()[1]
        timeout = timedelta(seconds=STORE_SECONDS)
        self._store: TCPStore | None = TCPStore(
            self._address, self._store_port, None, True, timeout, False, master_listen_fd=meeting.detach()
        )
        self.gate = Gate(self._address, port, key)  # last: the store exists, and nothing can fail any more

    @property
    def meeting(self) -> Rendezvous:
        store = f"{self._address}:{self._store_port}"
        return Rendezvous(store=store, machines=self._placement.nnodes, interface=self._interface)

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

    @property
    def _command(self) -> str:
        """The command for the other machines."""
        return f"python -m parallel_runtime join {self._placement.rdzv_endpoint} --token-file FILE"

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
            devices = self._devices(offer)
        except Refused as refused:
            with contextlib.suppress(OSError):
                channel.send(Denied(str(refused)))
            channel.close()
            raise WorkerStartError(say("start.machine", machine=name, reason=refused.sentence)) from None
        log.info("[CP] %s has joined with %s", name, ", ".join(devices))
        self.machines.append(RemoteMachine(channel, devices, offer.comfyui))

    def _devices(self, offer: Machine) -> tuple[str, ...]:
        """Returns the devices of that machine, one a rank. Raises Refused for one that does not match the group."""
        if pairs := version_mismatches(offer.versions):
            other, local = zip(*pairs, strict=True)
            raise Refused("machine.versions", theirs=list(other), ours=list(local))
        local = self._placement.devices
        devices = parse_devices(offer.devices or ",".join(local), offer.gpus)
        if len(devices) != len(local) or (devices[0] == "cpu") != (local[0] == "cpu"):
            raise Refused("machine.devices", devices=", ".join(devices), ours=", ".join(local))
        return devices


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
