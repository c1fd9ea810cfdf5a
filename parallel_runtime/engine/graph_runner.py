"""Decides when a network's forwards are recorded as CUDA graphs, replayed, or run eagerly. Knows no network.

It replaces the call of the network, outside of all hooks. How a recording is made is in cuda_graphs.py."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..request import GraphsChoice
from ..wire.messages import Graphs
from . import cuda_graphs
from .attention.attention_override import BackendOverride
from .comm.ranks import DeviceEvent, EventFactory, can_allocate, event_factory, seconds_between
from .cuda_graphs import Graph, Recorder

MAX_RECORDINGS = 4  # of a model
RETURN_EVALUATIONS = 16  # an evicted call that returns within these takes turns with others: it stays eager
MAX_TRIALS = 64  # calls that are remembered beside those that are recorded
MAX_REASONS = 8  # in a message to the user
WARMUP_EVALUATIONS = 2  # eager ones before the choice: the first does not show how long a launch takes
MAX_GROWTH = 1.25  # of a call's inputs to those of kept recordings, up to which it is recorded without a trial
MAX_UNREPLAYED = 2  # recordings without a trial that nobody has called again: inputs may differ in every step
MIN_LAUNCH_FRACTION = 0.7  # of an evaluation's time: where launches take more of it, a recording pays
MAX_RECORDED_SECONDS = 20.0  # of an evaluation: a replay does not show that the device gets on, and the host waits
MAX_REPLAY_RATIO = 1.05  # of a replay's time to an evaluation's: a slower replay is not worth its memory
SMALL_ELEMENTS = 1024  # CPU tensors up to this size are compared by value, and may have any alignment
LINE_BYTES = 64  # kernels are chosen by an address's offset in a line of this size
CONSTANT_TYPES = (
    int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, Enum, BackendOverride
)  # fmt: skip
NO_GAIN = "nothing to gain, the GPU computes longer than the CPU launches"
TOO_LONG = f"an evaluation takes more than {MAX_RECORDED_SECONDS:.0f} s"
SLOWER = "a replay of it took longer than the evaluation itself"


class Unrecordable(ValueError):
    """Says why a call of the network stays eager, in a few words."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a network: `key` is all that Python code can see of it; `slots` index its `tensors` by leaf."""

    key: Hashable
    tensors: list[Tensor]
    slots: list[int | None]
    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, args: Any, kwargs: dict[str, Any], device: torch.device, settings: Hashable = ()) -> Call:
        """Returns the call with these arguments. Raises Unrecordable for one that no key can represent."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors: dict[Hashable, Tensor] = {}  # by address and layout
        keys, slots = list[Hashable](), list[int | None]()
        for number, leaf in enumerate(leaves):
            slot: int | None = None
            is_tensor = type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided
            if isinstance(leaf, CONSTANT_TYPES):
                keys.append((type(leaf), leaf))
            elif is_tensor and leaf.device.type == device.type:
                layout = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
                tensors.setdefault(layout, leaf)
                slot = list(tensors).index(layout)
                keys.append((slot, leaf.shape, leaf.stride(), leaf.dtype, _offset(leaf)))
            elif is_tensor and leaf.device.type == "cpu" and leaf.numel() <= SMALL_ELEMENTS:
                keys.append((leaf.shape, leaf.dtype, *leaf.flatten().tolist()))
            else:
                path = pytree.keystr(pytree.tree_flatten_with_path((args, kwargs))[0][number][0])
                raise Unrecordable(f"it is given a {type(leaf).__name__} ({path})")
            slots.append(slot)
        return cls((settings, structure, *keys), list(tensors.values()), slots, leaves, structure)


def _offset(tensor: Tensor) -> int:
    """Returns the offset [elements] in a line, of tensors that are long enough for alignment to matter."""
    if tensor.numel() <= SMALL_ELEMENTS:
        return 0
    return int(tensor.storage_offset()) % max(1, LINE_BYTES // tensor.element_size())


def _dense(tensor: Tensor) -> Tensor:
    """Returns the part of `tensor` that memory has once: one row of an expanded dim."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _like_layout(tensor: Tensor) -> Tensor:
    """Returns new memory with the shape, strides and alignment of `tensor`: kernels treat both alike."""
    dense = _dense(tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(dense.shape, dense.stride(), strict=True))
    offset = _offset(tensor)
    memory = torch.empty(offset + span if dense.numel() else offset, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(eq=False)
class _Recording:
    """A recorded call. `tables` are the network's buffers and cached results when it was recorded: the graph still
    reads them after the network makes new ones, as a table of positions for a longer input."""

    graph: Graph
    inputs: list[Tensor]
    tables: list[Tensor]

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        _copy_into(self.inputs, tensors)
        self.graph.replay()
        return pytree.tree_map_only(Tensor, Tensor.clone, self.graph.out)


def _copy_into(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for target, tensor in zip(inputs, tensors, strict=True):
        _dense(target).copy_(_dense(tensor))


@dataclass(eq=False)
class _Trial:
    """A call that is not recorded: its evaluations so far; the last one's launch seconds and device events."""

    evaluations: int = 0
    eager: bool = False  # it stays eager
    launch_seconds: float = 0.0
    events: tuple[DeviceEvent, DeviceEvent] | None = None

    @property
    def seconds(self) -> float:
        """Waits until the device is through, and returns how long it took."""
        assert self.events is not None
        self.events[1].synchronize()
        return max(seconds_between(*self.events), 1e-9)


@dataclass(eq=False)
class GraphRunner:
    """Replaces a network's `__call__`: a call's first evaluations are eager, then it is recorded, then replayed. Where
    a recording has been kept, a call that is as large, as with another prompt, is recorded at its first evaluation.

    `visible_kwargs` returns the keyword arguments that the network can see, `settings` what else its code depends on,
    and `eager_reason` why it must stay eager now, or ""; the first and the last may raise Unrecordable. `any_rank`
    combines a flag of all ranks that share a forward, which record, replay and stay eager alike. `on_recording` is
    called with True when a recording begins and with False at its end. `other_models_bytes` is the size of other
    models' recordings. `before_timing`, before the deciding measurement, stops communication timers, which slow it."""

    network: nn.Module
    device: torch.device
    visible_kwargs: Callable[[dict[str, Any]], dict[str, Any]] = lambda kwargs: kwargs
    eager_reason: Callable[[], str] = str
    settings: Callable[[], Hashable] = tuple
    on_recording: Callable[[bool], None] = lambda begins: None
    other_models_bytes: Callable[[], int] = int
    before_timing: Callable[[], None] = lambda: None
    choice: GraphsChoice = "auto"
    any_rank: Callable[[bool], bool] = bool
    compiled: bool = False
    _recorded: OrderedDict[Hashable, _Recording] = field(default_factory=OrderedDict)
    _trials: dict[Hashable, _Trial] = field(default_factory=dict)
    _evicted: dict[Hashable, int] = field(default_factory=dict)  # key: evaluation when it was last called
    _reasons: dict[str, None] = field(default_factory=dict)
    _unreplayed: set[Hashable] = field(default_factory=set)  # recorded without a trial, and not called again yet
    _evaluations: int = 0
    _replays: int = 0

    def __post_init__(self) -> None:
        self._recorder: Recorder | None = cuda_graphs.recorder_for(self.device)
        self._now: EventFactory = event_factory(self.device)
        # torch's own place for what is called instead of a module and its hooks.
        self.network._compiled_call_impl = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.choice == "off" or self._recorder is None:
            return self._run_eager(args, kwargs)
        self._evaluations += 1
        call, reason = self._call(args, kwargs)
        if call is None:
            self._note_reason(reason)
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self._trial((reason, *(tensor.shape for tensor in tensors)), tensors)  # it may need recordings' memory
            return self._run_eager(args, kwargs)  # not inside of an `except`: hooks may ask what is being handled
        if recorded := self._recorded.get(call.key):
            self._recorded.move_to_end(call.key)
            self._replays += 1
            self._unreplayed.discard(call.key)
            return recorded.replay(call.tensors)
        trial = self._trial(call.key, call.tensors)
        if trial.eager:
            return self._run_eager(args, kwargs)
        if not trial.evaluations and self._is_like_recorded(call):
            self._unreplayed.add(call.key)
        elif trial.evaluations < self._warmup_evaluations:
            return self._timed(trial, args, kwargs)
        elif self.choice != "on" and not self.any_rank(trial.launch_seconds > MIN_LAUNCH_FRACTION * trial.seconds):
            return self._stay_eager(call, NO_GAIN, self._run_eager(args, kwargs))
        elif self.choice == "on" and self.any_rank(trial.seconds > MAX_RECORDED_SECONDS):
            return self._stay_eager(call, TOO_LONG, self._run_eager(args, kwargs))
        else:
            self._unreplayed.clear()  # calls come again
        if not self._evict_for(call.key):
            self._note_reason(f"more than {MAX_RECORDINGS} sizes, prompt lengths or the like take turns")
            return self._run_eager(args, kwargs)
        return self._record(call, self._recorder)

    def _call(self, args: Any, kwargs: dict[str, Any]) -> tuple[Call | None, str]:
        """Returns the call, or why it must not be recorded."""
        try:
            if reason := self.eager_reason():
                return None, reason
            return Call.of(args, self.visible_kwargs(kwargs), self.device, self.settings()), ""
        except Unrecordable as reason:
            return None, str(reason)

    def discard(self) -> None:
        """Discard all recordings: weights have moved, or memory is needed."""
        for state in (self._recorded, self._trials, self._evicted, self._unreplayed):
            state.clear()
        self._recorder = cuda_graphs.recorder_for(self.device)  # frees the recordings' shared memory

    @property
    def stats(self) -> Graphs:
        nbytes = 0
        for recorded in self._recorded.values():
            nbytes += recorded.graph.nbytes + sum(tensor.nbytes for tensor in recorded.inputs)
        return Graphs(keys=len(self._recorded), replays=self._replays, bytes=nbytes, eager=tuple(self._reasons))

    @property
    def _warmup_evaluations(self) -> int:
        return (1 if self.choice == "on" else WARMUP_EVALUATIONS) + self.compiled  # the first evaluation may compile

    def _run_eager(self, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.network._call_impl(*args, **kwargs)

    def _note_reason(self, reason: str) -> None:
        self._reasons.setdefault(reason)
        _evict_oldest(self._reasons, MAX_REASONS)

    def _trial(self, key: Hashable, tensors: Sequence[Tensor]) -> _Trial:
        if key not in self._trials:
            if self._recorded:  # an eager evaluation of `tensors` may lack memory beside the recordings
                recorded_bytes = self.stats.bytes
                largest = max(_elements(each.inputs) for each in self._recorded.values())
                needed = int(recorded_bytes * max(1.0, _elements(tensors) / max(1, largest)))
                pools_bytes = recorded_bytes + self.other_models_bytes()
                if self.any_rank(not can_allocate(self.device, needed, pools_bytes)):
                    self.discard()
            self._trials[key] = _Trial()
            _evict_oldest(self._trials, MAX_TRIALS)
        return self._trials[key]

    def _timed(self, trial: _Trial, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs and times an eager evaluation."""
        begun = self._now()
        # The last one decides, and begins on an idle device: a forward that waits for the device, to copy a constant,
        # would also wait for the evaluation before.
        if trial.evaluations == self._warmup_evaluations - 1:
            begun.synchronize()
            self.before_timing()
        started = time.perf_counter()
        out = self._run_eager(args, kwargs)
        trial.evaluations += 1  # a refused one does not count
        trial.launch_seconds = time.perf_counter() - started
        trial.events = begun, self._now()
        return out

    def _is_like_recorded(self, call: Call) -> bool:
        """Returns whether a recording of this call will pay as one that was kept does."""
        largest = max((_elements(each.inputs) for each in self._recorded.values()), default=0)
        return len(self._unreplayed) < MAX_UNREPLAYED and 0 < _elements(call.tensors) <= MAX_GROWTH * largest

    def _stay_eager(self, call: Call, reason: str, out: Any) -> Any:
        self._trials.setdefault(call.key, _Trial()).eager = True
        self._note_reason(reason)
        return out

    def _evict_for(self, key: Hashable) -> bool:
        """Evicts the least recently used recording if need be; False where the call and evicted ones take turns."""
        if len(self._recorded) < MAX_RECORDINGS:
            return True
        if self._evaluations - self._evicted.get(key, -RETURN_EVALUATIONS) < RETURN_EVALUATIONS:
            self._evicted[key] = self._evaluations
            return False
        oldest, _ = self._recorded.popitem(last=False)
        self._evicted[oldest] = self._evaluations
        _evict_oldest(self._evicted, MAX_TRIALS)
        return True

    def _record(self, call: Call, recorder: Recorder) -> Any:
        """Records the call; the recording is kept if its first replay equals the eager evaluation on all ranks."""
        inputs = [_like_layout(tensor) for tensor in call.tensors]

        def run() -> Any:
            slots = zip(call.leaves, call.slots, strict=True)
            leaves = [leaf if slot is None else inputs[slot] for leaf, slot in slots]
            args, kwargs = pytree.tree_unflatten(leaves, call.structure)
            return self._run_eager(args, kwargs)

        self.on_recording(True)
        try:
            _copy_into(inputs, call.tensors)
            out = pytree.tree_map_only(Tensor, Tensor.clone, recorder.warm_up(run))
            recorded, reason = self._try_record(recorder, run, inputs, call)
            if self.any_rank(recorded is None):
                return self._stay_eager(call, reason or "another worker could not record it", out)
            assert recorded is not None
            reason = "" if _equal(recorded.replay(call.tensors), out) else "a replay of it gave other numbers"
            if self.any_rank(bool(reason)):
                return self._stay_eager(call, reason or "a replay on another worker gave other numbers", out)
            if self.choice == "auto" and self.any_rank(self._is_slower(recorded, call)):
                return self._stay_eager(call, SLOWER, out)
        finally:
            self.on_recording(False)
        self._recorded[call.key] = recorded
        self._trials.pop(call.key)
        return out

    def _is_slower(self, recording: _Recording, call: Call) -> bool:
        """Returns whether a replay, but for the first, which sets the graph up, takes longer than the eager forward."""
        # Between GPUs without peer access each transfer is a graph node that waits for the CPU, and may cost the gain.
        eager = self._trials[call.key].events
        if eager is None:
            return False
        before = self._now()
        recording.replay(call.tensors)
        after = self._now()
        after.synchronize()
        return seconds_between(before, after) > MAX_REPLAY_RATIO * seconds_between(*eager)

    def _try_record(
        self, recorder: Recorder, run: Callable[[], Any], inputs: list[Tensor], call: Call
    ) -> tuple[_Recording | None, str]:
        """Returns the recording, or why there is none. Raises RuntimeError where the device is lost."""
        _copy_into(inputs, call.tensors)
        try:
            graph = recorder.record(run)
            return _Recording(graph, inputs, [*self.network.buffers(), *cuda_graphs.cached_results(self.network)]), ""
        except RuntimeError as error:
            reason = f"recording it failed: {(str(error) or type(error).__name__).splitlines()[0][:200]}"
        if self.device.type != "cpu":
            try:
                torch.accelerator.synchronize(self.device)
                torch.accelerator.empty_cache()
            except RuntimeError as lost:
                raise RuntimeError(f"the device was lost while a forward was recorded ({reason})") from lost
        return None, reason


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _evict_oldest(entries: dict[Any, Any], limit: int) -> None:
    while len(entries) > limit:
        del entries[next(iter(entries))]


def _equal(one: Any, other: Any) -> bool:
    """Returns whether both are equal to the bit; NaN equals NaN."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) if torch.is_tensor(a) else a == b for a, b in pairs)
