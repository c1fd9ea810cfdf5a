"""One rank's process: connect to the host, join the process group, measure how fast this rank computes and sends, run
jobs until the host disconnects; with the memory readings of this rank, and the message of an out-of-memory error.
"""

import contextlib
import logging
import os
import resource
import shutil
import signal
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..architectures.network_modules import weight_bytes
from ..demo import check_diffusers
from ..engine.comm import ranks
from ..engine.comm.collectives import all_to_all, differing_ranks, ring_send_recv
from ..engine.comm.mesh import GroupState, MeshDim, comm_device_of, mesh_dim_of
from ..engine.cuda_graphs import reporting_compilation, warm_compiler
from ..errors import OutOfMemory, ParallelError, Refused, say
from ..jobs import DemoJob, EvaluationJob, Job, VAEJob, answering_ranks
from ..specs import ComfySetup, Parallelism
from ..wire import messages
from ..wire.bundles import empty_bundle, read_bundle, write_bundle
from ..wire.channel import KEY, Channel, TcpChannel
from .agent import AGENT_PID, die_when
from .models import JobKinds, Model, Models
from .progress import Cancelled, Progress

GIB = 1 << 30
TOKEN = "CP_TOKEN"
PIECE_BYTES = 256 << 20  # of a payload
REPEATS = 3
CHECKED_NUMBERS = 1 << 18  # of each rank: 1 MiB, which NCCL sends as it sends large tensors
HEAD_SIZE = 128


def readings(device: torch.device, models: Sequence[Model]) -> messages.Readings:
    """Returns this rank's memory readings, for the page and for plans; in a run Progress adds those of its steps."""
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        used = total - free  # by all processes
    else:
        page = os.sysconf("SC_PAGE_SIZE")
        used, total = int(Path("/proc/self/statm").read_text().split()[1]) * page, os.sysconf("SC_PHYS_PAGES") * page
    weights = []
    for model in models:
        tensors = [*model.network.parameters(), *model.additional_weights]
        resident = sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type)
        resident -= model.nonresident_bytes
        offloaded = sum(tensor.nbytes for tensor in tensors) - resident
        recorded = model.graph_runner.stats.bytes
        weights.append(messages.ModelMemory(model.spec.title, resident, offloaded, model.spec.fingerprint, recorded))
    stats = [model.graph_runner.stats for model in models]
    graphs = messages.Graphs(
        keys=sum(one.keys for one in stats),
        replays=sum(one.replays for one in stats),
        bytes=sum(one.bytes for one in stats),
        eager=tuple(dict.fromkeys(reason for one in stats for reason in one.eager)),
    )
    return messages.Readings(
        used,
        total,
        tuple(weights),
        graphs=graphs,
        free_bytes=ranks.free_bytes(device),
        allocator_free_bytes=max(0, ranks.cached_bytes(device) - graphs.bytes),
        host_free_bytes=ranks.host_free_bytes(),
    )


class Worker:
    def __init__(self, channel: Channel, device: torch.device, kinds: JobKinds) -> None:
        self._channel = channel
        self._device = device
        self._models = Models(device, {kind: load for kind, (load, _) in kinds.items()})
        self._loops = {kind: run for kind, (_, run) in kinds.items()}
        self._output: int | None = None  # the memory file of the next request's result, of a VAE

    def joined(self) -> messages.Joined:
        """Measures this rank's speeds and memory. Collective."""
        ring = None
        if ranks.world_size() > 1:
            ring = self._models.mesh(Parallelism(ring_degree=ranks.world_size())).ring
        speeds = measured_speeds(self._device, ring)
        if ring is not None:
            self._models.group_state.heterogeneous = bool(differing_ranks(ranks.device_kind(self._device)))
        return replace(speeds, readings=self._readings())

    @torch.inference_mode()
    def serve(self) -> None:
        """Answers requests. Raises EOFError when the host disconnects, OutOfMemory, and whatever else a job raises."""
        try:
            while True:
                message, bundle = self._channel.receive()
                match message:
                    case messages.Run():
                        self._channel.send(*self._answer(message, payload(bundle)))
                    case messages.Measure(job=job, model=model, after=after, recordings=recordings, degrees=degrees):
                        if degrees is not None:
                            self._models.connect(degrees, sharded=message.sharded)
                        elif model is not None and recordings:
                            nbytes = message.nbytes if ranks.rank() in message.ranks else 0
                            self._models.discard_recordings(model, nbytes)
                        elif model is not None:
                            self._models.free(model, after)
                        self._channel.send(messages.Done(job, readings=self._readings()))
                    case messages.MapOutput():
                        self._output = bundle
                # A Cancel here has lost the race with the answer.
        except (RuntimeError, MemoryError) as error:
            # PyTorch's CPU allocator raises a plain RuntimeError.
            if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
                raise self._out_of_memory() from error
            raise

    def _out_of_memory(self) -> OutOfMemory:
        """Returns an error that says what filled the memory, and what to do."""
        models = []
        for model in self._models.loaded:
            size = weight_bytes(model.network) - model.nonresident_bytes
            models.append(say("died.memory.model", model=model.name, size=f"{size / GIB:.2f}"))
        if self._device.type != "cpu":
            most = torch.accelerator.max_memory_allocated(self._device)
        else:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return OutOfMemory(
            say(
                "died.memory",
                device=str(self._device),
                models=models or say("died.memory.none"),
                most=f"{most / GIB:.2f}",
                free=f"{ranks.free_bytes(self._device) / GIB:.2f}",
            )
        )

    def _answer(self, request: messages.Run, bundle: int) -> tuple[messages.Done, int | None]:
        """Runs a job and returns its answer, or its refusal: the host checks that all ranks refused."""
        fields, kinds = read_bundle(bundle), {kind.__name__: kind for kind in typing.get_args(Job)}
        job: Job = kinds[fields.pop("kind")](**fields)
        if isinstance(job, VAEJob):
            job = replace(job, output=self._output)
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


def measured_speeds(device: torch.device, ring: MeshDim | None) -> messages.Joined:
    """Measures how fast this rank computes and sends blocks, in a fraction of a second. Collective."""

    def best_seconds(run: Callable[[], object]) -> float:
        times = []
        for _ in range(1 + REPEATS):  # the first one warms up
            started = time.perf_counter()
            run()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - started)
        return max(min(times[1:]), 1e-9)

    on_cpu, is_cuda, bytes_per_second = device.type == "cpu", device.type == "cuda", 0.0
    if ring is not None:  # a send to the next rank while the previous one's block arrives
        block = torch.ones((1 if on_cpu else 64) << 20, dtype=torch.uint8, device=device)
        received = torch.empty_like(block)
        dist.barrier()
        bytes_per_second = block.nbytes / best_seconds(lambda: ring_send_recv(block, received, ring).wait())
    # In the precision that models use on this device.
    size, dtype = (384, torch.float32) if on_cpu else (4096, torch.bfloat16)
    a = torch.ones(size, size, device=device, dtype=dtype)
    flops_per_second = 2 * size**3 / best_seconds(lambda: a @ a)
    # From main memory, while all ranks do the same.
    on_host = torch.ones((64 if is_cuda else 4) << 20, dtype=torch.uint8, pin_memory=is_cuda)
    target = torch.empty_like(on_host, device=device)
    host_bytes_per_second = on_host.nbytes / best_seconds(lambda: target.copy_(on_host, non_blocking=True))
    # The ratio of attention to the matrix product differs between cards.
    heads, tokens = (4, 512) if on_cpu else (24, 4096)
    q = torch.ones(1, heads, tokens, HEAD_SIZE, device=device, dtype=dtype)
    seconds = best_seconds(lambda: scaled_dot_product_attention(q, q, q))
    return messages.Joined(
        flops_per_second,
        bytes_per_second,
        host_bytes_per_second,
        attention_flops_per_second=4 * heads * tokens**2 * HEAD_SIZE / seconds,
    )


def payload(bundle: int | None) -> int:
    """Returns the descriptor of a request's bundle, of which rank 0 sends other machines a copy over gloo. Collective
    then."""
    if ranks.machine_count() == 1:
        assert bundle is not None
        return bundle
    size = torch.tensor(os.fstat(bundle).st_size if bundle is not None else 0)
    dist.broadcast(size, src=0)
    fd = empty_bundle(int(size)) if bundle is None else bundle
    is_copy = bundle is None  # rank 0's is sealed against writing
    memory: Tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=is_copy, size=int(size), dtype=torch.uint8)
    for piece in memory.split(PIECE_BYTES):
        dist.broadcast(piece, src=0)
    return fd


def check_links(device: torch.device) -> None:
    """Compares what arrives from the previous rank of a ring, and from all ranks in an all-to-all, with what they sent.
    Collective. Raises ParallelError."""
    # A broken P2P would make wrong pictures without a word.
    if ranks.world_size() == 1:
        return
    assert dist.group.WORLD is not None
    world = mesh_dim_of(dist.group.WORLD, comm_device_of(device), GroupState())
    sent = torch.arange(CHECKED_NUMBERS * world.size, dtype=torch.int32, device=device)
    part = sent[world.index * CHECKED_NUMBERS :][:CHECKED_NUMBERS]
    before = (world.index - 1) % world.size
    received = torch.zeros_like(sent)
    ring_send_recv(sent + 7919 * world.index, received, world).wait()
    wrong = [] if torch.equal(received, sent + 7919 * before) else [before]
    all_to_all(sent + 7919 * world.index, received, None, None, world).wait()
    blocks = enumerate(received.chunk(world.size))
    wrong += [rank for rank, block in blocks if not torch.equal(block, part + 7919 * rank)]
    if wrong:
        raise ParallelError(say("start.corrupt", ranks=", ".join(map(str, sorted({*wrong})))))


def main(address: str) -> None:
    """Answers the host at `address` until it disconnects: a unix socket, or host:port from another machine."""
    logging.basicConfig(level=logging.WARNING, format=f"[CP rank {ranks.rank()}] %(message)s")
    key = os.environ.pop(KEY, "")
    channel = Channel.connect(address) if os.path.isabs(address) else TcpChannel.call(address, key)

    def end_torchrun() -> None:
        """Removes the group's folder and kills torchrun, as the host would if it still ran."""
        shutil.rmtree(os.environ["CP_FOLDER"], ignore_errors=True)
        if os.getppid() == (agent := int(os.environ[AGENT_PID])):  # a stopped one would not end by itself
            os.kill(agent, signal.SIGKILL)

    die_when(channel.hung_up, end_torchrun)
    channel.send(messages.Ready(ranks.rank(), os.getpid(), os.environ.pop(TOKEN), messages.PROTOCOL))
    try:
        welcome, _ = channel.receive()
        assert isinstance(welcome, messages.Welcome)
        device = torch.device(welcome.device)
        ranks.join(device, welcome.store, through_main_memory=welcome.through_main_memory)
        check_links(device)
        channel.send(messages.Connected())
        worker = Worker(channel, device, _job_kinds(welcome.comfy, device))
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


def _job_kinds(comfy: ComfySetup | None, device: torch.device) -> JobKinds:
    kinds = JobKinds()
    if comfy is None:  # the host will only ask for the demo
        with contextlib.suppress(Refused):
            _demo()
    else:
        from .comfy_loop import start  # ComfyUI exists only once its root is known

        kinds = start(comfy, device)
    kinds[DemoJob] = (lambda *args: _demo().load(*args), lambda *args: _demo().run(*args))
    return kinds


def _demo() -> Any:
    """Imports the demo. Raises Refused without diffusers, which only the demo needs and which imports slowly."""
    check_diffusers()
    from . import demo_loop

    return demo_loop
