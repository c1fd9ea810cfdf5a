"""Starts the processes of a group and connects to them: a torchrun on each machine, a connection for each rank."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, TypeVar

from ..accelerators import ACCELERATORS, Transport
from ..errors import Sentence, WorkerDied, WorkerStartError, say
from ..planning.run_plan import DeviceProfile, Speed
from ..specs import ComfySetup, Placement
from ..wire.channel import Channel, short_path
from ..wire.messages import PROTOCOL, Connected, Ended, Failed, Joined, MapOutput, Ready, Welcome
from .activity import Activity
from .machines import Cluster, RemoteMachine
from .torchrun import GRACE_SECONDS, Rendezvous, Torchrun

POLL_SECONDS = 0.1
CONNECT_SECONDS = 30.0  # for the first exchange of tensors, where a slower transport is left to try
Answer = TypeVar("Answer", Connected, Joined)

log = logging.getLogger(__name__)
_transports_that_worked: dict[tuple[str, ...], Transport] = {}  # by devices, where it was not the first one


class NotConnected(WorkerStartError):
    """The workers have started, and their devices could not exchange tensors, or received others than were sent."""


def start_workers(
    placement: Placement, activity: Activity, comfy: ComfySetup | None, timeout: float, watch: Callable[[], None]
) -> tuple[Processes, DeviceProfile]:
    """Starts every rank, with the first transport that works between their devices, and measures these. Raises
    WorkerStartError with the reason; where no transport works, with that of the fastest one."""
    accelerator = ACCELERATORS.get(placement.devices[0].partition(":")[0])
    shared = len(set(placement.devices)) < len(placement.devices)
    transports = [Transport()]
    if placement.devices in _transports_that_worked:
        transports = [_transports_that_worked[placement.devices]]
    elif accelerator is not None and not shared and placement.nnodes == 1 < placement.world_size:
        for slower in accelerator.slower_transports:
            # What the user's environment sets already is not tried again.
            if slower.through_main_memory or slower.environment.keys() - os.environ.keys():
                transports.append(slower)
    first_error: NotConnected | None = None
    for transport in transports:
        processes = Processes(placement, activity, transport)
        try:
            connect_timeout = timeout if transport is transports[-1] else min(timeout, CONNECT_SECONDS)
            profile = processes.start_and_connect(comfy, timeout, connect_timeout, watch)
        except NotConnected as error:
            processes.close()
            log.warning("[CP] %s", error)
            first_error = first_error or error
            continue
        except BaseException:
            processes.close()
            raise
        if transport.log_line and placement.devices not in _transports_that_worked:
            log.warning("[CP] %s", transport.log_line)
            _transports_that_worked[placement.devices] = transport
        return processes, profile
    assert first_error is not None
    raise first_error


class Processes:
    """The workers and their torchruns. `start_and_connect` fills `channels`, in rank order."""

    def __init__(self, placement: Placement, activity: Activity, transport: Transport) -> None:
        self.channels: list[Channel] = []
        self._activity = activity
        self._placement = placement
        self._transport = transport
        self.pids: list[int] = []
        self._token = secrets.token_hex(16)
        self._cluster: Cluster | None = None
        with contextlib.ExitStack() as undo:
            try:
                self._server = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                self._torchrun = Torchrun(range(len(placement.devices)), activity.journal)
                undo.callback(self._torchrun.close)
                self._address = os.path.join(self._torchrun.folder, "socket")
                with short_path(self._address) as address:
                    self._server.bind(address)
            except OSError as error:  # such as a full disk
                raise WorkerStartError(say("start.folder", error=str(error))) from None
            undo.pop_all()
        self._machines: list[Torchrun | RemoteMachine] = [self._torchrun]  # in the order of their ranks
        self._places = [(self._machines[0], device) for device in placement.devices]  # of each rank, with its machine
        self._rendezvous = Rendezvous(store=os.path.join(self._torchrun.folder, "store"))
        self._server.listen(placement.world_size)
        self._server.settimeout(POLL_SECONDS)

    def start_and_connect(
        self, comfy: ComfySetup | None, timeout: float, connect_timeout: float, watch: Callable[[], None]
    ) -> DeviceProfile:
        """Starts every rank, accepts it and waits until the group has formed, which has `connect_timeout` seconds from
        then on to exchange its first tensors. Raises WorkerStartError, with the reason.

        Returns the measured device profile, with the slowest rank's rates."""
        self._activity.starting(self._placement)
        if self._placement.nnodes > 1:
            self._cluster = Cluster(self._placement, self._token)
            self._activity.set_stage("machines")
            self._cluster.wait_for_machines(time.monotonic() + timeout, watch)
            for machine in self._cluster.machines:
                self._machines.append(machine)
                self._places += [(machine, device) for device in machine.devices]
            self._rendezvous = self._cluster.meeting
        self._activity.set_stage("processes")
        self._torchrun.start(self._address, self._token, self._rendezvous, transport=self._transport)
        deadline = time.monotonic() + timeout  # anew: machines that came late take nothing from the workers
        ranks = range(self._placement.world_size)
        connected: dict[int, tuple[Channel, int]] = {}
        while len(connected) < len(ranks):
            late = say("start.few", count=len(connected), workers=len(ranks), seconds=f"{timeout:.0f}")
            self._check_start(deadline, late)
            watch()
            for channel, ready in self._new_connections():
                connected[ready.rank] = channel, ready.pid
                self._activity.set_stage("processes", len(connected))
        self.channels, self.pids = map(list, zip(*(connected[rank] for rank in ranks), strict=True))
        self._welcome(comfy)
        self._activity.set_stage("meeting")
        try:
            self._answers(Connected, time.monotonic() + connect_timeout, watch)
        except WorkerStartError as error:
            if error.cause is not None and error.cause.signal in ("SIGKILL", "SIGTERM"):  # somebody's doing
                raise
            raise NotConnected(error.sentence, error.cause) from None
        joined = self._answers(Joined, deadline, watch)
        self._server.close()
        os.unlink(self._address)
        self._activity.joined(joined, [self.machine_of(rank) for rank in ranks])
        answers = [joined[rank] for rank in ranks]
        return DeviceProfile(
            bytes_per_second=min(answer.bytes_per_second for answer in answers),
            flops_per_second=min(answer.flops_per_second for answer in answers),
            host_bytes_per_second=min(answer.host_bytes_per_second for answer in answers),
            ranks=tuple(Speed(products=x.flops_per_second, attention=x.attention_flops_per_second) for x in answers),
        )

    def _answers(self, kind: type[Answer], deadline: float, watch: Callable[[], None]) -> dict[int, Answer]:
        """Returns the next message of every rank, which has to be of this kind."""
        ranks, answers = range(self._placement.world_size), dict[int, Answer]()
        while len(answers) < len(ranks):
            watch()
            # Messages are read in the order of arrival: a failed rank makes its peers fail too.
            silent = {self.channels[rank].fileno(): rank for rank in ranks if rank not in answers}
            answering = [silent[fd] for fd in wait(list(silent), POLL_SECONDS) if isinstance(fd, int)]
            for rank in answering:
                try:
                    answer, _ = self.channels[rank].receive()
                except EOFError:
                    died, (machine, _) = self.died(rank), self._places[rank]
                    starting = _with_last_line(say("start.died", died=died.sentence), machine.last_line())
                    raise WorkerStartError(starting, died.cause) from None
                if isinstance(answer, Failed):
                    failed = say("start.failed", worker=self.worker_name(rank), reason=answer.sentence)
                    raise WorkerStartError(failed, answer.cause)
                assert isinstance(answer, kind)
                answers[rank] = answer
                if kind is Joined:
                    self._activity.set_stage("meeting", len(answers))
            if not answering:
                self._check_start(deadline, say("start.apart", workers=len(ranks), count=len(silent)))
        return answers

    def ask(self, message: Any, bundle: int | None = None, output: int | None = None) -> None:
        """Sends to every rank; `bundle` on several machines to rank 0, which passes it on, and before that the memory
        file `output` to the ranks of this machine, as no other shares memory with it. Raises WorkerDied."""
        for rank, channel in enumerate(self.channels):
            sent = [(message, bundle if rank == 0 or self._placement.nnodes == 1 else None)]
            if output is not None and rank < len(self._placement.devices):
                sent.insert(0, (MapOutput(), output))
            for each, file in sent:
                copy = None if file is None else os.dup(file)
                try:
                    channel.send(each, copy)
                except OSError:
                    raise self.died(rank) from None

    def running(self) -> bool:
        """Are all torchruns and connected ranks alive?"""
        return all(machine.running() for machine in self._machines) and not self._hung_up_ranks

    def worker_name(self, rank: int) -> Sentence:
        """Returns the rank's name for users, with its device, and its machine if that is another one."""
        machine, device = self._places[rank]
        on = say("worker.on", rank=rank, device=device, machine=machine.machine)
        return on if machine.machine else say("worker", rank=rank, device=device)

    def machine_of(self, rank: int) -> str:
        """The address of the rank's machine; "" for this one."""
        return self._places[rank][0].machine

    def died(self, rank: int) -> WorkerDied:
        """Returns how the rank ended, or the one that failed before it, as far as torchrun reports it shortly."""
        cause = self._places[rank][0].cause_of_death(rank)
        # With this torchrun ends the others where a rank has failed.
        if cause.signal == "SIGTERM":
            causes = (cause for machine in self._machines for cause in (machine.ended() or Ended()).causes)
            cause = next((other for other in causes if other.signal != "SIGTERM"), cause)
        return WorkerDied(cause.sentence(self.worker_name(cause.rank)), cause)

    def loss(self) -> WorkerDied:
        """Returns the error of a dead group. Of several ranks that have hung up nothing is known before that."""
        hung_up = self._hung_up_ranks
        if len(hung_up) == 1:
            self._activity.rank_gone(self.worker_name(hung_up[0]), hung_up[0])
        return self.died(hung_up[0] if hung_up else 0)

    def kill(self) -> None:
        """Ends every process of this machine: ranks die with their torchrun. Safe on any thread, also while closing."""
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
    def _hung_up_ranks(self) -> list[int]:
        return [rank for rank, channel in enumerate(self.channels) if channel.hung_up(0)]

    def _new_connections(self) -> list[tuple[Channel, Ready]]:
        """Returns the ranks that have connected since the last call, after waiting up to POLL_SECONDS; connections of
        others, which lack the token, are closed. Raises WorkerStartError for a rank of another version."""
        callers: list[Channel] = []
        with contextlib.suppress(TimeoutError):
            callers.append(Channel(self._server.accept()[0]))
        with contextlib.suppress(queue.Empty):
            while self._cluster is not None:
                callers.append(self._cluster.gate.arrivals.get_nowait())
        greeted = []
        for channel in callers:
            ready = channel.greeting(Ready, GRACE_SECONDS)
            # compare_digest takes equally long for every wrong token.
            if ready is None or not secrets.compare_digest(ready.token.encode(), self._token.encode()):
                channel.close()
            elif ready.protocol != PROTOCOL:
                raise WorkerStartError(say("start.changed"))
            else:
                greeted.append((channel, ready))
        return greeted

    def _welcome(self, comfy: ComfySetup | None) -> None:
        shared = len({*self._places}) < len(self._places)
        by_memory = shared or self._transport.through_main_memory
        for channel, (machine, device) in zip(self.channels, self._places, strict=True):
            setup = comfy
            if comfy is not None and isinstance(machine, RemoteMachine) and machine.comfyui:
                setup = replace(comfy, root=machine.comfyui, folder=machine.comfyui)
            with contextlib.suppress(OSError):  # a worker that died meanwhile is named where its answer is read
                channel.send(Welcome(device, self._rendezvous.store, by_memory, setup))

    def _check_start(self, deadline: float, late: Sentence) -> None:
        """Raises WorkerStartError where a process has ended, or with `late` past the deadline."""
        if not self.running():
            # Of a worker that has ended torchrun may not know yet.
            number = next((number for number, machine in enumerate(self._machines) if not machine.running()), 0)
            machine = self._machines[number]
            ended = machine.ended(GRACE_SECONDS) or Ended()
            cause = next(iter(ended.causes), None) or machine.cause_of_death(number * len(self._placement.devices))
            if cause.kind in ("killed", "torchrun"):  # its last line would be torchrun's, which says the same
                reason = say("start.died", died=cause.sentence(self.worker_name(cause.rank)))
            else:
                reason = _with_last_line(say("start.ended"), ended.error or machine.last_line())
            if machine.machine:
                reason = say("on.machine", reason=reason, machine=machine.machine)
            disk = os.statvfs(self._torchrun.folder)
            full = not disk.f_bavail or (bool(disk.f_files) and not disk.f_favail)
            known = cause if cause.kind != "gone" else None
            raise WorkerStartError(say("start.full", reason=reason) if full else reason, known)
        if time.monotonic() > deadline:
            lines = filter(None, (machine.last_line() for machine in self._machines))
            raise WorkerStartError(_with_last_line(say("start.late", late=late), next(lines, "")))


def _with_last_line(sentence: Sentence, line: str) -> Sentence:
    """Adds the workers' last printed line."""
    return say("start.printed", reason=sentence, line=line) if line else sentence
