"""One rank's life: meet the host, join the group, run jobs until the host goes away."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import typing
from functools import partial
from typing import Any

import torch

from ..demo import check_diffusers
from ..errors import Refused
from ..jobs import DemoJob, EvaluationJob, Job, VAEJob
from ..specs import DEMO, ComfySetup, Parallelism
from ..wire.bundles import read_bundle, write_bundle
from ..wire.channel import Channel
from ..wire.handshake import KEY
from ..wire.messages import (
    PROTOCOL,
    Cancel,
    Done,
    Failed,
    Joined,
    Measure,
    Ready,
    Room,
    Run,
    Welcome,
)
from ..wire.readings import Readings
from ..wire.stream import Stream
from . import link
from .agent import AGENT_PID
from .engine.compiling import telling
from .engine.moments import now_on
from .leash import die_when, end_parent
from .memory import is_out_of_memory, out_of_memory, readings
from .models import Load, Loop, Models
from .pulse import Cancelled, Pulse
from .ranks import apart, join, kind_of, rank, world_size
from .spread import payload
from .vaes import VAEs

TOKEN = "CP_TOKEN"
SENTENCE = 2000  # characters of a refusal, which has to fit into a packet whatever they are


class Worker:
    def __init__(
        self, channel: Channel, device: torch.device, loops: dict[type, Loop], loaders: dict[str, Load]
    ) -> None:
        self._channel = channel
        self._device = device
        self._models = Models(device, loaders)
        self._vaes = VAEs(device)
        self._loops: dict[type, Loop] = {VAEJob: self._vaes, **loops}

    def joined(self) -> Joined:
        """Measure this rank. Collective."""
        speed = 0.0
        if world_size() > 1:
            everybody = self._models.mesh(Parallelism(ring_degree=world_size())).ring
            speed = link.bytes_per_second(everybody, self._device)
            self._models.world.unlike = bool(apart(kind_of(self._device).encode()))
        return Joined(
            link.flops_per_second(self._device),
            speed,
            link.host_bytes_per_second(self._device),
            self._readings(),
            link.attention_flops_per_second(self._device),
        )

    def serve(self) -> None:
        """Until the host is gone. Raises EOFError then, what a job raised, and RuntimeError where memory ran out."""
        try:
            self._serve()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise RuntimeError(out_of_memory(self._device, self._models.loaded)) from error
            raise

    @torch.inference_mode()
    def _serve(self) -> None:
        while True:
            message, bundle = self._channel.receive()
            match message:
                case Run():
                    self._channel.send(*self._answer(message, payload(bundle)))
                case Measure(job=job, model=model, offload=offload):
                    if model is not None:
                        self._models.let_go(model, offload=offload)
                    self._channel.send(Done(job, readings=self._readings()))
                case Room():
                    assert bundle is not None
                    self._vaes.make_room(bundle)
                case Cancel():
                    pass  # it lost the race with the answer

    def _answer(self, request: Run, bundle: int) -> tuple[Done, int | None]:
        """A refusal is an answer: this rank is at rest again, and whether all are is for the host to see."""
        job = read_job(read_bundle(bundle))
        now, world = now_on(self._device), self._models.world
        pulse = Pulse(self._channel, request.job, self._readings, now=now, world=world)
        try:
            return self._run(request, job, pulse)
        except Refused as refused:
            said = str(refused)[:SENTENCE]
        finally:
            self._vaes.leave_room()
        self._models.recover()
        return Done(request.job, refused=said, readings=pulse.readings()), None

    def _run(self, request: Run, job: Job, pulse: Pulse) -> tuple[Done, int | None]:
        pulse.loading(0.0)
        started = time.monotonic()
        model = self._models.get(request, pulse.loading, job)
        model.recording.telling = partial(pulse.busy, "recording")
        loaded = time.monotonic()
        result: dict[str, Any] | None = None
        with contextlib.suppress(Cancelled), telling(partial(pulse.busy, "compiling")):
            result = self._loops[type(job)](model, job, pulse)
        self._models.rest(briefly=isinstance(job, EvaluationJob | VAEJob))  # of these the next is a moment away
        if result is None:
            return Done(request.job, cancelled=True, readings=pulse.readings()), None
        found = write_bundle(result) if rank() == 0 else None  # waits for the device, which the time must count
        seconds = time.monotonic() - loaded
        done = Done(request.job, load_seconds=loaded - started, seconds=seconds, readings=pulse.readings())
        return done, found

    def _readings(self) -> Readings:
        return readings(self._device, self._models.loaded, self._models.world)


def read_job(fields: dict[str, Any]) -> Job:
    kinds = {kind.__name__: kind for kind in typing.get_args(Job)}
    return kinds[fields.pop("kind")](**fields)


def main(address: str) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"[CP rank {rank()}] %(message)s")
    channel = _call(address)
    die_when(channel.hung_up, _end_torchrun)
    channel.send(Ready(rank(), os.getpid(), os.environ.pop(TOKEN), PROTOCOL))
    try:
        welcome, _ = channel.receive()
        assert isinstance(welcome, Welcome)
        device = torch.device(welcome.device)
        join(device, welcome.store, shared=welcome.shared)
        loops, loaders = _comfy_loop(welcome.comfy, device)
        loops[DemoJob], loaders[DEMO] = lambda *given: _demo().run(*given), lambda *given: _demo().load(*given)
        worker = Worker(channel, device, loops, loaders)
        channel.send(worker.joined())
        worker.serve()
    except EOFError:
        pass  # the host is gone, so are we
    except Exception as error:  # the one place where a rank reports its death
        channel.send(Failed.of(rank(), error))
    # Not a clean exit: destroying the process group waits for peers that may never come.
    os._exit(0)


def _end_torchrun() -> None:
    """What the host would do, were it there."""
    shutil.rmtree(os.environ["CP_FOLDER"], ignore_errors=True)
    end_parent(int(os.environ[AGENT_PID]))


def _call(address: str) -> Channel:
    """The host's unix socket on its own machine, host:port on another."""
    key = os.environ.pop(KEY, "")
    return Channel.connect(address) if os.path.isabs(address) else Stream.call(address, key)


def _comfy_loop(comfy: ComfySetup | None, device: torch.device) -> tuple[dict[type, Loop], dict[str, Load]]:
    if comfy is None:  # the demo is all that will be asked for
        with contextlib.suppress(Refused):
            _demo()
        return {}, {}
    from .comfy_loop import start  # ComfyUI exists only once its root is known

    return start(comfy, device)


def _demo() -> Any:
    """Raises Refused without diffusers, which takes seconds to import: nothing of ComfyUI's needs it."""
    check_diffusers()
    from . import demo_loop

    return demo_loop
