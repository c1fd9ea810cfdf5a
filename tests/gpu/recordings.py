"""Records ComfyUI's own FLUX and Wan, divided over the ranks as in a run: whether they are recorded, whether many
replays give the same bits, what a replay consists of, and whether the memory of a recording counts as its model's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from parallel_runtime.engine import graph_runner
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.planning.memory_model import shortage
from parallel_runtime.specs import ModelSpec, Parallelism, Placement
from parallel_runtime.worker.models import Model
from parallel_runtime.worker.serve import readings

from ..bench.report.attention_cases import parallelisms
from ..bench.report.measuring import GIB, NEEDS_CUDA, Case, Measurement, Setting, clocked, largest, mean_error, unbroken
from ..bench.report.network_cases import Subject, plan_of, subjects

STEPS, REPLAYS, CFG = 8, 200, 3.0
REPLAY_SECONDS = 30  # a network that takes longer for REPLAYS is replayed in fewer runs
MARGIN = 256 << 20  # bytes that other work leaves of the device, beside what a run needs
KINDS = {  # by what the names of kernels contain, the first that fits
    "NCCL": ("nccl",),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "packing by cat": ("CatArray",),
    "copies": ("copy", "Memcpy"),
    "products": ("gemm", "cutlass", "nvjet", "cublas"),
    "others": ("",),
}


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    if graph_runner.cuda_graphs.recorder_for(device) is None:
        yield Case({"what": "recorded forwards"}, partial(dict, note=NEEDS_CUDA))
        return
    for subject in subjects(setting):
        trial = RecordedNetwork(subject, device, alone=not setting.one_card)
        for words, parallelism in degrees(setting.world_size):
            labels = {"what": subject.name, "degrees": words}
            yield from unbroken(labels, trial.cases(labels, parallelism))


def degrees(world_size: int) -> list[tuple[str, Parallelism]]:
    """Returns ring and Ulysses each alone; for four ranks and more both at once, in two communicators."""
    rotated = [each for each in parallelisms(world_size) if each[1].options.rotate_method == "alltoall"]
    both = [each for each in rotated if min(each[1].ring_degree, each[1].ulysses_degree) > 1]
    return both or rotated or [("1 rank", Parallelism())]


class RecordedNetwork:
    """A network, and runs of it by Euler steps that evaluate the prompt and the negative prompt apart: nothing in
    them waits for the device. `alone`: no other rank shares the device."""

    def __init__(self, subject: Subject, device: torch.device, *, alone: bool) -> None:
        network: nn.Module = subject.build(torch.bfloat16, device)
        spec = ModelSpec(loader=subject.name)
        self._device, self._alone = device, alone
        self._model = Model(spec, network, plan_of(network), device=device)
        self._prompts = [subject.inputs(device) for _ in range(2)]

    def cases(self, labels: Measurement, parallelism: Parallelism) -> Iterator[Case]:
        self._mesh = build_mesh(parallelism, self._device)
        self._model.parallelize(self._mesh, parallelism)
        yield Case(labels | {"mode": "eager"}, self._eager)
        yield Case(labels | {"mode": "auto"}, self._auto)
        yield Case(labels | {"mode": "replays"}, self._replays)
        yield Case(labels | {"mode": "one replay"}, partial(timeline_of, self._once, self._device))
        for run in (1, 2, 3) if self._alone and self._device.type == "cuda" else ():
            yield Case(labels | {"mode": f"run {run} on a full device"}, partial(self._on_a_full_device, run))
        yield Case(labels | {"mode": "after its recordings were dropped"}, self._dropped)

    def _sampled(self, call: Callable[..., Any], steps: int = STEPS) -> Tensor:
        x = self._prompts[0]["x"]
        for _ in range(steps):
            cond, uncond = (call(**{**prompt, "x": x}, transformer_options={}) for prompt in self._prompts)
            x = x - (uncond + CFG * (cond - uncond)) / steps
        return x

    def _eager(self) -> Measurement:
        """Times an eager evaluation, and compares a first run with a second one: where they differ, the network itself
        gives no bits twice. Keeps the second run, and the memory that a run needs, for the measurements after it."""
        call = self._model.network._call_impl
        first = self._sampled(call)
        self._expected = self._sampled(call)
        self._free_at_rest = self._free()
        used = 0 if self._device.type == "cpu" else torch.cuda.memory_allocated(self._device)
        times = clocked(lambda: call(**self._prompts[0], transformer_options={}), self._device)
        self._needed = max(0, int(times.get("gib", 0.0) * GIB) - used)
        (slowest,) = largest(times["ms"])  # so that all ranks replay alike
        self._replayed_runs = max(1, min(REPLAYS, int(1e3 * REPLAY_SECONDS / slowest)) // (2 * STEPS))
        return times | {"error": mean_error(first, self._expected)}

    def _auto(self) -> Measurement:
        """Samples with recording on auto, and returns its decision with the share of launches that it followed from."""
        before = self._model.graph_runner.stats.replays
        self._sampled(self._model.network, 1)
        trials = [trial for trial in self._model.graph_runner._trials.values() if trial.events]
        launched = (
            f"{trials[0].launch_seconds / trials[0].seconds:.0%} of an evaluation is its launch; " if trials else ""
        )
        error = mean_error(self._sampled(self._model.network), self._expected)
        stats = self._model.graph_runner.stats
        decided = (
            f"recorded, {stats.replays - before} replays" if stats.keys else f"not recorded: {'; '.join(stats.eager)}"
        )
        return {"error": error, "graph_gib": stats.bytes / GIB, "note": launched + decided}

    def _replays(self) -> Measurement:
        """Checks the bits of runs that make up to REPLAYS replays together, and times one."""
        self._model.graph_runner.discard()
        self._model.graph_runner.choice = "on"
        samples = [self._sampled(self._model.network) for _ in range(1 + self._replayed_runs)]
        stats = self._model.graph_runner.stats
        differing = sum(not torch.equal(each, self._expected) for each in samples)
        measurement = clocked(self._once, self._device) | {"graph_gib": stats.bytes / GIB}
        measurement |= {"note": f"{stats.replays} replays"}
        assert stats.keys, f"not recorded: {'; '.join(stats.eager)}"
        assert not differing, f"{differing} of {len(samples)} runs gave other numbers than the eager one"
        return measurement

    def _once(self) -> Any:
        return self._model.network(**self._prompts[0], transformer_options={})

    def _on_a_full_device(self, run: int) -> Measurement:
        """Checks that a workflow's next run fits as its first one did: other work leaves as much memory as the first
        run needs, and after that the recording has it."""
        if run == 1:
            self._model.graph_runner.discard()
        graph_bytes = self._model.graph_runner.stats.bytes
        excess_bytes = max(0, self._free() - max(MARGIN, self._needed + MARGIN - graph_bytes))
        ballast = torch.empty(excess_bytes, dtype=torch.uint8, device=self._device)
        reading = readings(self._device, [self._model])
        weights = sum(model.resident for model in reading.weights)
        lack = shortage(
            Placement(devices=(str(self._device),)), [reading], self._model.spec.fingerprint, [weights + self._needed],
            limits=[None], limited_by="",
        )  # fmt: skip
        assert torch.equal(self._sampled(self._model.network), self._expected), "it gave other numbers"
        del ballast
        note = f"it would be refused: {lack}" if lack else "it fits"
        return {"gib": reading.free_bytes / GIB, "graph_gib": graph_bytes / GIB, "note": note}

    def _dropped(self) -> Measurement:
        """Returns the device memory that is still taken after all ranks have dropped their recordings."""
        self._model.graph_runner.discard()
        largest(0.0)  # all have dropped theirs
        taken = self._free_at_rest - self._free()
        self._model.graph_runner.choice = "auto"
        return {"gib": taken / GIB, "note": "still taken"}

    def _free(self) -> int:
        gc.collect()
        if self._device.type == "cpu":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class Span(NamedTuple):
    """A kernel or a copy, in microseconds."""

    name: str
    begin: float
    end: float


def timeline_of(run: Callable[[], Any], device: torch.device) -> Measurement:
    """Returns what one run consists of on a GPU."""
    if device.type != "cuda":
        return {"note": NEEDS_CUDA}
    run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    return summed(Span(event.name, event.time_range.start, event.time_range.end) for event in events)


def summed(spans: Iterable[Span]) -> Measurement:
    """Returns the time from the first kernel to the last, and in words what it consists of."""
    ordered = sorted(spans, key=lambda span: span.begin)
    if not ordered:
        return {"note": "the profiler saw nothing on the device"}
    busy, until = 0.0, ordered[0].begin
    of_kinds: dict[str, list[float]] = {}
    for span in ordered:
        busy += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
        kind = next(kind for kind, parts in KINDS.items() if any(part in span.name for part in parts))
        of_kinds.setdefault(kind, []).append(span.end - span.begin)
    total = until - ordered[0].begin
    times = {kind: of_kinds[kind] for kind in KINDS if kind in of_kinds}
    parts = [f"{kind} {len(each)} in {sum(each) / 1e3:.3g} ms" for kind, each in times.items()]
    return {"ms": total / 1e3, "note": f"{(total - busy) / 1e3:.3g} ms of it without a kernel; {', '.join(parts)}"}
