"""Start the processes of a group and meet them: a torchrun and a socket on each machine, a connection a rank."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from ..errors import WorkerDied, WorkerStartError
from ..specs import ComfySetup, Placement
from ..wire.channel import Channel, short_path
from ..wire.messages import PROTOCOL, Failed, Joined, Ready, Room, Welcome
from .activity import Activity
from .cluster import Cluster, Remote
from .cost import Link, Speed, coarse
from .journal import Journal
from .torchrun import GRACE_SECONDS, Meeting, Torchrun, last_error

POLL_SECONDS = 0.1


class Processes:
    """The workers and what started them. `channels` is filled by `meet`, in rank order."""

    def __init__(self, placement: Placement, activity: Activity) -> None:
        self.channels: list[Channel] = []
        self._activity = activity
        self._placement = placement
        self.pids: list[int] = []
        self._token = secrets.token_hex(16)
        self._cluster: Cluster | None = None
        self._torchrun, self._server = _meeting_place(activity.journal)
        self._address = os.path.join(self._torchrun.folder, "socket")
        self._meeting = Meeting(store=os.path.join(self._torchrun.folder, "store"))
        self._server.listen(placement.world_size)
        self._server.settimeout(POLL_SECONDS)

    def meet(self, comfy: ComfySetup | None, timeout: float, watch: Callable[[], None]) -> Link:
        """Start every rank, accept it and wait until the group has formed. Raises WorkerStartError, with the reason.

        Returns what the ranks measured, the slowest of each.
        """
        self._activity.starting(self._placement)
        self._start(time.monotonic() + timeout, watch)
        deadline = time.monotonic() + timeout  # anew: machines that came late take nothing from the workers
        ranks = range(self._placement.world_size)
        met: dict[int, tuple[Channel, int]] = {}
        while len(met) < len(ranks):
            self._check_start(deadline, f"only {len(met)} of {len(ranks)} workers came up in {timeout:.0f} s")
            watch()
            for channel in self._callers():
                if ready := self._admit(channel):
                    met[ready.rank] = channel, ready.pid
                    self._activity.reached("processes", len(met))
        self.channels, self.pids = [met[rank][0] for rank in ranks], [met[rank][1] for rank in ranks]
        self._welcome(comfy)
        self._activity.reached("meeting")
        joined: dict[int, Joined] = {}
        while len(joined) < len(ranks):
            watch()
            # Who speaks first is heard first: a rank that fails takes its peers with it, and they say so too.
            silent = {self.channels[rank].fileno(): rank for rank in ranks if rank not in joined}
            heard = [silent[fd] for fd in wait(list(silent), POLL_SECONDS) if isinstance(fd, int)]
            for rank in heard:
                joined[rank] = self._joined(rank, self.channels[rank])
                self._activity.reached("meeting", len(joined))
            if not heard:
                apart = f"all {len(ranks)} workers came up, but {len(silent)} did not find the others in time"
                self._check_start(deadline, apart)
        self._server.close()
        os.unlink(self._address)
        self._activity.joined(joined, [self.machine_of(rank) for rank in ranks])
        return Link(
            bytes_per_second=coarse(min(answer.bytes_per_second for answer in joined.values())),
            flops_per_second=coarse(min(answer.flops_per_second for answer in joined.values())),
            host_bytes_per_second=coarse(min(answer.host_bytes_per_second for answer in joined.values())),
            ranks=tuple(
                Speed(products=joined[rank].flops_per_second, attention=joined[rank].attention_flops_per_second)
                for rank in ranks
            ),
        )

    def ask(self, message: Any, bundle: int | None = None) -> None:
        """Every rank. `bundle` goes to those of this machine; where there are several, to rank 0, which passes it on.
        Raises WorkerDied."""
        for rank in range(len(self.channels)):
            self._send(rank, message, bundle if rank == 0 or self._placement.nnodes == 1 else None)

    def make_room(self, job: int, room: int) -> None:
        """For the ranks of this machine; others have no memory in common with it. Raises WorkerDied."""
        for rank in range(len(self._placement.devices)):
            self._send(rank, Room(job), room)

    def running(self) -> bool:
        """Every torchrun is there, and so is every rank that we have met."""
        return all(machine.running() for machine in self._machines) and not self._gone

    def named(self, rank: int) -> str:
        """With the machine, where there are several."""
        machine = self.machine_of(rank)
        return f"rank {rank} on {machine}" if machine else f"rank {rank}"

    def machine_of(self, rank: int) -> str:
        """The address of the rank's machine; "" for this one."""
        return self._machine(rank).machine

    def died(self, rank: int) -> WorkerDied:
        """How the rank's torchrun says that it ended, as far as it has said so a moment later."""
        return WorkerDied(f"worker {self.named(rank)} {self._cause_of_death(rank)}", rank)

    def loss(self) -> WorkerDied:
        """Which rank of a group that no longer runs was the first to go, as far as torchrun says so."""
        first = next(iter(self._gone), None)
        self._activity.gone("of another machine" if first is None else self.named(first), first)
        losses = [self.died(rank) for rank in range(len(self.channels))]
        told = [loss for loss in losses if "killed by" in str(loss) or "exited" in str(loss)]
        return next((loss for loss in told if "SIGTERM" not in str(loss)), (told or losses)[0])

    def kill(self) -> None:
        """End every process of this machine now: ranks die with their torchrun. Safe on any thread, also while another
        one closes."""
        self._torchrun.kill()

    def close(self) -> None:
        """End every process. Idempotent."""
        if self._cluster is not None:
            self._cluster.close()
        self._torchrun.close()
        for channel in self.channels:
            channel.close()
        self._server.close()

    @property
    def _gone(self) -> list[int]:
        """The ranks that have hung up."""
        return [rank for rank, channel in enumerate(self.channels) if channel.hung_up(0)]

    def _send(self, rank: int, message: Any, bundle: int | None) -> None:
        copy = None if bundle is None else os.dup(bundle)
        try:
            self.channels[rank].send(message, copy)
        except OSError:
            raise self.died(rank) from None

    @property
    def _machines(self) -> list[Torchrun | Remote]:
        """In the order of their ranks."""
        return [self._torchrun, *(self._cluster.machines if self._cluster else [])]

    def _machine(self, rank: int) -> Torchrun | Remote:
        return self._machines[rank // len(self._placement.devices)]

    def _start(self, deadline: float, watch: Callable[[], None]) -> None:
        if self._placement.nnodes > 1:
            self._cluster = Cluster(self._placement, self._token)
            self._activity.reached("machines")
            self._cluster.gather(deadline, watch)
            self._meeting = self._cluster.meeting
        self._activity.reached("processes")
        self._torchrun.start(len(self._placement.devices), self._address, self._token, self._meeting)

    def _callers(self) -> list[Channel]:
        """Who has called since the last time, after a moment."""
        callers: list[Channel] = []
        with contextlib.suppress(TimeoutError):
            callers.append(Channel(self._server.accept()[0]))
        with contextlib.suppress(queue.Empty):
            while self._cluster is not None:
                callers.append(self._cluster.gate.arrivals.get_nowait())
        return callers

    def _admit(self, channel: Channel) -> Ready | None:
        """The rank's greeting, if it is one of ours; a stranger is shown the door."""
        ready = channel.greeting(Ready, GRACE_SECONDS)
        if ready is None or not secrets.compare_digest(ready.token.encode(), self._token.encode()):
            channel.close()
            return None
        if ready.protocol != PROTOCOL:
            raise WorkerStartError("the files of CP Sampler changed while ComfyUI was running; restart ComfyUI")
        return ready

    def _welcome(self, comfy: ComfySetup | None) -> None:
        remotes = self._cluster.machines if self._cluster else []
        devices = [self._placement.devices, *(machine.devices for machine in remotes)]
        setups = [comfy, *(machine.comfy(comfy) for machine in remotes)]
        shared = any(len(set(names)) < len(names) for names in devices)
        for rank, channel in enumerate(self.channels):
            machine, place = divmod(rank, len(self._placement.devices))
            channel.send(Welcome(devices[machine][place], self._meeting.store, shared, setups[machine]))

    def _cause_of_death(self, rank: int) -> str:
        return self._machine(rank).cause_of_death(self.pids[rank])

    def _joined(self, rank: int, channel: Channel) -> Joined:
        try:
            answer, _ = channel.receive()
        except EOFError:
            cause = self._cause_of_death(rank)
            raise WorkerStartError(f"{self.named(rank)} {cause} while starting{self._last_error()}", rank) from None
        if isinstance(answer, Failed):
            raise WorkerStartError(f"{self.named(rank)} could not start: {answer.error} ({answer.where})", rank)
        assert isinstance(answer, Joined)
        return answer

    def _check_start(self, deadline: float, late: str) -> None:
        """Raises WorkerStartError where a process has ended, or with `late` past the deadline."""
        if not self.running():
            # Of a worker that has ended torchrun may not know yet.
            ended = next((machine for machine in self._machines if not machine.running()), self._torchrun)
            on = f" on {ended.machine}" if ended.machine else ""
            reason = last_error(ended.last_words())
            room = "; set TMPDIR to a folder with room" if "No space left" in reason else ""
            raise WorkerStartError(f"the workers{on} ended before they were up{reason}{room}")
        if time.monotonic() > deadline:
            way_out = "on a slow or busy machine start ComfyUI, or your script, with a larger CP_START_SECONDS"
            raise WorkerStartError(f"{late}; {way_out}{self._last_error()}")

    def _last_error(self) -> str:
        return next(filter(None, (last_error(machine.lines) for machine in self._machines)), "")


def _meeting_place(journal: Journal) -> tuple[Torchrun, socket.socket]:
    """A torchrun with its private folder, and our socket in it. Raises WorkerStartError where there is no room."""
    torchrun, server = None, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        torchrun = Torchrun(journal)
        with short_path(os.path.join(torchrun.folder, "socket")) as address:
            server.bind(address)
    except OSError as error:
        server.close()
        if torchrun is not None:
            torchrun.close()
        raise WorkerStartError(
            f"there is no place for the workers' socket: {error}; set TMPDIR to a folder that can be written"
        ) from None
    return torchrun, server
