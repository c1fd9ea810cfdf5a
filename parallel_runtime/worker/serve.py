"""One rank's process: connect to the host, join the process group, run jobs until the host disconnects; with the memory
readings of this rank, and the message of an out-of-memory error.
"""

import contextlib
import logging
import os
import resource
import shutil
import time
import typing
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..architectures.network_modules import weight_bytes
from ..demo import check_diffusers
from ..engine.comm import ranks
from ..engine.comm.collectives import differing_ranks
from ..engine.cuda_graphs import reporting_compilation, warm_compiler
from ..errors import OutOfMemory, Refused, Sentence, say
from ..jobs import DemoJob, EvaluationJob, Job, VAEJob, answering_ranks
from ..specs import ComfySetup, Parallelism
from ..wire import messages
from ..wire.bundles import read_bundle, write_bundle
from ..wire.channel import KEY, Channel, TcpChannel
from . import links
from .agent import AGENT_PID, die_when, end_parent
from .links import payload
from .models import Load, Loop, Model, Models
from .progress import Cancelled, Progress

GIB = 1 << 30


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether `error` means out of memory; PyTorch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def out_of_memory(device: torch.device, models: Sequence[Model]) -> Sentence:
    """Returns a sentence that says what filled the memory, and one that says what to do."""
    sizes = [(model.name, weight_bytes(model.network) - model.nonresident_bytes) for model in models]
    most, free = (size / GIB for size in (_peak_bytes(device), ranks.free_bytes(device)))
    return say(
        "died.memory",
        device=str(device),
        models=[say("died.memory.model", model=name, size=f"{size / GIB:.2f}") for name, size in sizes]
        or say("died.memory.none"),
        most=f"{most:.2f}",
        free=f"{free:.2f}",
    )


def readings(device: torch.device, models: Sequence[Model]) -> messages.Readings:
    """Returns this rank's memory readings, for the page and for plans; in a run Progress adds those of its steps."""
    used, total = _used_and_total(device)
    graphs = _sum([model.graph_runner.stats for model in models])
    return messages.Readings(
        used,
        total,
        tuple(_model_memory(model, device) for model in models),
        graphs=graphs,
        free_bytes=ranks.free_bytes(device),
        allocator_free_bytes=max(0, ranks.cached_bytes(device) - graphs.bytes),
        host_free_bytes=ranks.host_free_bytes(),
    )


def _sum(stats: list[messages.Graphs]) -> messages.Graphs:
    keys, replays, nbytes = (sum(getattr(one, name) for one in stats) for name in ("keys", "replays", "bytes"))
    reasons = dict.fromkeys(reason for graphs in stats for reason in graphs.eager)
    return messages.Graphs(keys=keys, replays=replays, bytes=nbytes, eager=tuple(reasons))


def _model_memory(model: Model, device: torch.device) -> messages.ModelMemory:
    tensors = [*model.network.parameters(), *model.additional_weights]
    resident = sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type) - model.nonresident_bytes
    offloaded = sum(tensor.nbytes for tensor in tensors) - resident
    recorded = model.graph_runner.stats.bytes
    return messages.ModelMemory(model.spec.title, resident, offloaded, model.spec.fingerprint, recorded)


def _used_and_total(device: torch.device) -> tuple[int, int]:
    """Returns (used, total) bytes: used by all processes on a GPU, by this one in main memory."""
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        return total - free, total
    page = os.sysconf("SC_PAGE_SIZE")
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * page, os.sysconf("SC_PHYS_PAGES") * page


def _peak_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


TOKEN = "CP_TOKEN"


class Worker:
    def __init__(
        self, channel: Channel, device: torch.device, loops: dict[type, Loop], loaders: dict[type, Load]
    ) -> None:
        self._channel = channel
        self._device = device
        self._models = Models(device, loaders)
        self._loops = loops
        self._output: int | None = None  # the memory file of the next request's result, of a VAE

    def joined(self) -> messages.Joined:
        """Measures this rank's speeds and memory. Collective."""
        link_bytes_per_second = 0.0
        if ranks.world_size() > 1:
            ring = self._models.mesh(Parallelism(ring_degree=ranks.world_size())).ring
            link_bytes_per_second = links.bytes_per_second(ring, self._device)
            self._models.group_state.heterogeneous = bool(differing_ranks(ranks.device_kind(self._device)))
        return messages.Joined(
            links.flops_per_second(self._device),
            link_bytes_per_second,
            links.host_bytes_per_second(self._device),
            self._readings(),
            links.attention_flops_per_second(self._device),
        )

    def serve(self) -> None:
        """Answers requests. Raises EOFError when the host disconnects, OutOfMemory, and whatever else a job raises."""
        try:
            self._serve()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise OutOfMemory(out_of_memory(self._device, self._models.loaded)) from error
            raise

    @torch.inference_mode()
    def _serve(self) -> None:
        while True:
            message, bundle = self._channel.receive()
            match message:
                case messages.Run():
                    self._channel.send(*self._answer(message, payload(bundle)))
                case messages.Measure(job=job, model=model, after=after, recordings=recordings, degrees=degrees):
                    if degrees is not None:
                        self._models.connect(degrees, sharded=message.sharded)
                    elif model is not None and recordings:
                        self._models.discard_recordings(model, message.nbytes if ranks.rank() in message.ranks else 0)
                    elif model is not None:
                        self._models.free(model, after)
                    self._channel.send(messages.Done(job, readings=self._readings()))
                case messages.MapOutput():
                    self._output = bundle
                case messages.Cancel():
                    pass  # it lost the race with the answer

    def _answer(self, request: messages.Run, bundle: int) -> tuple[messages.Done, int | None]:
        """Runs a job and returns its answer, or its refusal: the host checks that all ranks refused."""
        job = read_job(read_bundle(bundle), self._output)
        now, state = ranks.event_factory(self._device), self._models.group_state
        progress = Progress(self._channel, request.job, self._readings, state, now)
        try:
            return self._run(request, job, progress)
        except Refused as refused:
            refusal = messages.Refusal.of(refused)
        finally:
            if self._output is not None:
                os.close(self._output)
                self._output = None
        self._models.recover()
        return messages.Done(request.job, refused=refusal, readings=progress.readings()), None

    def _run(self, request: messages.Run, job: Job, progress: Progress) -> tuple[messages.Done, int | None]:
        progress.loading(0.0)
        started = time.monotonic()
        model = self._models.get(request, progress.loading, job)
        model.graph_runner.on_recording = partial(progress.busy, "recording")
        loaded = time.monotonic()
        result: dict[str, Any] | None = None  # where the job is cancelled
        with progress.reporting_blocks(self._models.block_counter):
            with contextlib.suppress(Cancelled), reporting_compilation(partial(progress.busy, "compiling")):
                result = self._loops[type(job)](model, job, progress)
            self._models.end_job(keep_buffers=isinstance(job, EvaluationJob | VAEJob))  # the next one follows at once
            # It waits for the device: before `seconds` is read.
            result_fd = write_bundle(result) if result is not None and ranks.rank() in answering_ranks(job) else None
        seconds = time.monotonic() - loaded
        done = messages.Done(request.job, load_seconds=loaded - started, seconds=seconds, readings=progress.readings())
        return done, result_fd

    def _readings(self) -> messages.Readings:
        return readings(self._device, self._models.loaded)


def read_job(fields: dict[str, Any], output: int | None = None) -> Job:
    kinds = {kind.__name__: kind for kind in typing.get_args(Job)}
    job: Job = kinds[fields.pop("kind")](**fields)
    return replace(job, output=output) if isinstance(job, VAEJob) else job


def main(address: str) -> None:
    """Answers the host at `address` until it disconnects: a unix socket, or host:port from another machine."""
    logging.basicConfig(level=logging.WARNING, format=f"[CP rank {ranks.rank()}] %(message)s")
    key = os.environ.pop(KEY, "")
    channel = Channel.connect(address) if os.path.isabs(address) else TcpChannel.call(address, key)
    die_when(channel.hung_up, _end_torchrun)
    channel.send(messages.Ready(ranks.rank(), os.getpid(), os.environ.pop(TOKEN), messages.PROTOCOL))
    try:
        welcome, _ = channel.receive()
        assert isinstance(welcome, messages.Welcome)
        device = torch.device(welcome.device)
        ranks.join(device, welcome.store, through_main_memory=welcome.through_main_memory)
        links.check_links(device)
        channel.send(messages.Connected())
        worker = Worker(channel, device, *_loops_and_loaders(welcome.comfy, device))
        channel.send(worker.joined())
        if welcome.comfy is not None and welcome.comfy.compiles:
            warm_compiler()
        worker.serve()
    except EOFError:
        pass  # the host has disconnected
    except Exception as error:  # the one place where a rank reports its death
        channel.send(messages.Failed.of(ranks.rank(), error))
    # Not a clean exit: destroying the process group waits for peers that may never come.
    os._exit(0)


def _end_torchrun() -> None:
    """Removes the group's folder and kills torchrun, as the host would if it still ran."""
    shutil.rmtree(os.environ["CP_FOLDER"], ignore_errors=True)
    end_parent(int(os.environ[AGENT_PID]))


def _loops_and_loaders(comfy: ComfySetup | None, device: torch.device) -> tuple[dict[type, Loop], dict[type, Load]]:
    loops, loaders = dict[type, Loop](), dict[type, Load]()
    if comfy is None:  # the host will only ask for the demo
        with contextlib.suppress(Refused):
            _demo()
    else:
        from .comfy_loop import start  # ComfyUI exists only once its root is known

        loops, loaders = start(comfy, device)
    loops[DemoJob], loaders[DemoJob] = lambda *args: _demo().run(*args), lambda *args: _demo().load(*args)
    return loops, loaders


def _demo() -> Any:
    """Imports the demo. Raises Refused without diffusers, which only the demo needs and which imports slowly."""
    check_diffusers()
    from . import demo_loop

    return demo_loop
