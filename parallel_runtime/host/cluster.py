"""The other machines of a group: they come to the gate, are checked, and get their place and a store to meet in."""

from __future__ import annotations

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
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from ..errors import ProtocolError, Refused, WorkerStartError
from ..specs import ComfySetup, Placement
from ..wire.handshake import prove, read_key
from ..wire.messages import Denied, Invitation, Left, Machine
from ..wire.stream import CONNECT_SECONDS, Stream
from .devices import parse_devices
from .endpoint import interface_of, listen, parse
from .torchrun import GRACE_SECONDS, PACKAGE, Meeting, cause_of_death

LAST_WORDS_SECONDS = 1.5
STORE_SECONDS = 600
MOST_AT_A_TIME = 16  # knock at the gate

log = logging.getLogger(__name__)


class Remote:
    """A machine that has joined, as Torchrun is for this one. Its connection is silent until its torchrun ends."""

    def __init__(self, control: Stream, devices: tuple[str, ...], comfyui: str) -> None:
        self.machine = control.addresses[1]
        self.devices = devices
        self.control = control
        self.lines: list[str] = []
        self._gone = False
        self._comfyui = comfyui

    def comfy(self, setup: ComfySetup | None) -> ComfySetup | None:
        """The same ComfyUI where it lies there."""
        if setup is None or not self._comfyui:
            return setup
        return ComfySetup(root=self._comfyui, flags=setup.flags, folder=self._comfyui, version=setup.version)

    def running(self) -> bool:
        return not self._gone and not self.control.waiting()

    def cause_of_death(self, pid: int) -> str:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        return cause_of_death(self.last_words(), pid) if not self.running() else "went away"

    def last_words(self) -> list[str]:
        """What its torchrun printed last, if it has ended."""
        if not self._gone and self.control.waiting():
            self._gone = True
            with contextlib.suppress(EOFError, ProtocolError):
                message, _ = self.control.receive()
                self.lines = list(message.lines) if isinstance(message, Left) else []
        return self.lines


class Cluster:
    """Listens at `placement.rdzv_endpoint` for as long as the group lives."""

    def __init__(self, placement: Placement, group_token: str) -> None:
        self._placement = placement
        key = read_key()
        self._group_token = group_token
        self._address, port = parse(placement.rdzv_endpoint)
        self._interface = interface_of(self._address)
        self.machines: list[Remote] = []
        self.gate = Gate(self._address, port, key)
        meeting = listen(self._address, 0)
        self._store_port = meeting.getsockname()[1]
        timeout = timedelta(seconds=STORE_SECONDS)
        self._store: TCPStore | None = TCPStore(
            self._address, self._store_port, None, True, timeout, False, master_listen_fd=meeting.detach()
        )

    @property
    def meeting(self) -> Meeting:
        """For the torchrun of this machine."""
        store = f"{self._address}:{self._store_port}"
        return Meeting(store=store, machines=self._placement.nnodes, interface=self._interface)

    def gather(self, deadline: float, watch: Callable[[], None]) -> None:
        """Wait until every machine is there. `watch` is called often, and ends the wait by raising. Raises
        WorkerStartError."""
        missing = self._placement.nnodes - 1
        log.info(
            "[CP] waiting at %s for %d other machine(s); on each run: %s",
            self._placement.rdzv_endpoint, missing, self._command,
        )  # fmt: skip
        while len(self.machines) < missing:
            watch()
            if time.monotonic() > deadline:
                raise WorkerStartError(self._missing())
            self.machines = [machine for machine in self.machines if machine.running()]
            with contextlib.suppress(queue.Empty):
                self._admit(self.gate.arrivals.get(timeout=0.1))
        for index, machine in enumerate(self.machines, start=1):
            machine.control.send(
                Invitation(
                    index=index,
                    nnodes=self._placement.nnodes,
                    workers=len(machine.devices),
                    store=self._store_port,
                    token=self._group_token,
                )
            )

    def _missing(self) -> str:
        """Why the wait was in vain."""
        there = ", ".join(machine.machine for machine in self.machines) or "none"
        return (
            f"only {1 + len(self.machines)} of {self._placement.nnodes} machines are there (others: {there}); on each "
            f"other machine run: {self._command}"
        )

    @property
    def _command(self) -> str:
        """What a user types on the other machines."""
        return f"python -m parallel_runtime join {self._placement.rdzv_endpoint} --token-file FILE"

    def close(self) -> None:
        for machine in self.machines:
            machine.control.close()
        self.gate.close()
        self._store = None

    def _admit(self, stream: Stream) -> None:
        """A machine that fits waits for the others; one that does not ends the start, and both sides say why."""
        offer = stream.greeting(Machine, GRACE_SECONDS)
        if offer is None:  # such as a rank of a group that is gone
            stream.close()
            return
        name = stream.addresses[1]
        try:
            devices = self._devices(offer)
        except Refused as refused:
            with contextlib.suppress(OSError):
                stream.send(Denied(str(refused)))
            stream.close()
            raise WorkerStartError(f"the machine {name} cannot join: {refused}") from None
        log.info("[CP] %s has joined with %s", name, ", ".join(devices))
        self.machines.append(Remote(stream, devices, offer.comfyui))

    def _devices(self, offer: Machine) -> tuple[str, ...]:
        """Of that machine, one a rank. Raises Refused where the machine does not fit the group."""
        if skew := difference(offer.versions):
            raise Refused(skew)
        ours = self._placement.devices
        devices = parse_devices(offer.devices or ",".join(ours), offer.gpus)
        if len(devices) != len(ours) or (devices[0] == "cpu") != (ours[0] == "cpu"):
            raise Refused(
                f"it offers {', '.join(devices)}, where the machine of ComfyUI has {', '.join(ours)}; give as many "
                "devices of the same kind, with --devices there or `devices` in CP Parallel Config"
            )
        return devices


class Gate:
    """Where other machines and their ranks come in: one port at the address that the user named, behind the token. Who
    has shown that is in `arrivals`; who has not is shown the door, and named in the log."""

    def __init__(self, address: str, port: int, key: str) -> None:
        self.arrivals: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._key = key
        self._open = True
        self._refused: set[str] = set()
        self._places = threading.BoundedSemaphore(MOST_AT_A_TIME)
        self._server = listen(address, port)
        self._thread = threading.Thread(target=self._listen, name="gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self.arrivals.get_nowait().close()

    def _listen(self) -> None:
        while self._open:
            try:
                sock, (address, _) = self._server.accept()
            except OSError:
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(sock, address), daemon=True).start()
            else:
                sock.close()

    def _admit(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(CONNECT_SECONDS)
            if prove(sock, self._key, host=True):
                self.arrivals.put(Stream(sock))
                return
            self._refuse(address, "its token is not the one of this machine")
        except (OSError, EOFError):
            self._refuse(address, "it showed no token")
        finally:
            self._places.release()
        sock.close()

    def _refuse(self, address: str, reason: str) -> None:
        """Said once an address: it may knock every second."""
        if address not in self._refused:
            log.warning("[CP] %s was refused: %s", address, reason)
        self._refused.add(address)


@functools.cache
def versions() -> tuple[str, ...]:
    """What machines must have in common to compute together: this one's, each with its name. Of PyTorch also the build,
    which pip does not always tell."""
    return (
        f"CP Sampler {_digest()}",
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
        f"PyTorch {torch.__version__}",
    )


def difference(theirs: tuple[str, ...]) -> str:
    """What is not the same there, in words; "" where all is."""
    pairs = zip(theirs, versions(), strict=False)
    found = [f"it has {other}, this machine {ours}" for other, ours in pairs if other != ours]
    return "; ".join(found) + "; install the same on both" if found else ""


def _digest() -> str:
    """Of this package's code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]
