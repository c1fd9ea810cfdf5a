"""A network whose forwards are recorded and replayed: when, which calls, and when not. Knows no network and no CUDA.

It stands where the network is called, outside of all hooks. What a recording is made of is in graphs.py.
"""

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

from ...specs import GraphsChoice
from ...wire.readings import Graphs
from . import graphs
from .graphs import Graph, Recorder
from .memory import free_bytes, spare_bytes
from .moments import Moment, Now, now_on

KEYS = 4  # recordings of a model
TURNS = 16  # evaluations: what made place for another and comes back within so many takes turns with it
SEEN = 64  # calls that are remembered beside those that are recorded
TOLD = 8  # reasons: a message is no place for more
WARM = 2  # evaluations before a choice is made: the first says nothing of how long a launch takes
LAUNCHED = 0.7  # of an evaluation's time: whose launch takes longer gains by a recording
SMALL = 1024  # elements: so many in main memory are compared by value, and lie anywhere in a line
LINE = 64  # bytes: kernels are chosen by an address's place in such a line
PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, Enum)
NOTHING_TO_GAIN = "nothing to gain, the GPU computes longer than the CPU launches"

Agree = Callable[[bool], bool]  # true on every rank that shares the forward when it is true on any


class Unrecordable(ValueError):
    """Why a call of the network stays eager, in a few words."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a network in words. `key` is all that Python can see of it; `tensors` are what it cannot see into, each
    once, and `slots` their numbers by leaf."""

    key: Hashable
    tensors: list[Tensor]
    slots: list[int | None]
    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, args: Any, kwargs: dict[str, Any], device: torch.device, known: Sequence[Any] = ()) -> Call:
        """Raises Unrecordable for what has no words; objects that are `known` to be the same each time need none."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors: dict[Hashable, Tensor] = {}  # by where each lies, and how
        words, slots = [], []
        for number, leaf in enumerate(leaves):
            word, slot = _word(leaf, tensors, device, known)
            if word is None:
                place = pytree.keystr(pytree.tree_flatten_with_path((args, kwargs))[0][number][0])
                raise Unrecordable(f"it is given a {type(leaf).__name__} ({place})")
            words.append(word)
            slots.append(slot)
        return cls((structure, *words), list(tensors.values()), slots, leaves, structure)

    def on(self, tensors: Sequence[Tensor]) -> tuple[Any, dict[str, Any]]:
        """The same call of other tensors, in lists and dicts of its own."""
        leaves = [leaf if slot is None else tensors[slot] for leaf, slot in zip(self.leaves, self.slots, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


def _word(
    leaf: Any, tensors: dict[Hashable, Tensor], device: torch.device, known: Sequence[Any]
) -> tuple[Hashable | None, int | None]:
    """What of a leaf is part of a key, and its number among the tensors."""
    if isinstance(leaf, PLAIN) or any(leaf is each for each in known):
        return (type(leaf), leaf), None
    if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
        return None, None
    if leaf.device.type == device.type:
        lies = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
        tensors.setdefault(lies, leaf)
        slot = list(tensors).index(lies)
        return (slot, leaf.shape, leaf.stride(), leaf.dtype, _offset(leaf)), slot
    if leaf.device.type == "cpu" and leaf.numel() <= SMALL:
        return (leaf.shape, leaf.dtype, *leaf.flatten().tolist()), None
    return None, None


def _offset(tensor: Tensor) -> int:
    """Elements from the beginning of a line, of tensors that are long enough for it to matter."""
    if tensor.numel() <= SMALL:
        return 0
    return int(tensor.storage_offset()) % max(1, LINE // tensor.element_size())


def _dense(tensor: Tensor) -> Tensor:
    """What of it lies in memory once: an expanded dim is one row."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _twin(tensor: Tensor) -> Tensor:
    """Memory of its own, laid out as this: no kernel can tell the two apart."""
    dense = _dense(tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(dense.shape, dense.stride(), strict=True))
    offset = _offset(tensor)
    memory = torch.empty(offset + span if dense.numel() else offset, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


@dataclass(eq=False)
class _Recorded:
    graph: Graph
    inputs: list[Tensor]

    @property
    def nbytes(self) -> int:
        return self.graph.nbytes + sum(tensor.nbytes for tensor in self.inputs)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        _fill(self.inputs, tensors)
        self.graph.replay()
        return _copied(self.graph.out)


def _fill(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for there, given in zip(inputs, tensors, strict=True):
        _dense(there).copy_(_dense(given))


def _copied(out: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.clone, out)


@dataclass(eq=False)
class _Trial:
    """A call that is not recorded: how often it ran; how long its last launch took, and from when to when it ran."""

    evaluations: int = 0
    eager: bool = False  # it stays so
    launch_seconds: float = 0.0
    moments: tuple[Moment, Moment] | None = None

    @property
    def launched(self) -> float:
        """The share of its time that the host took to launch it."""
        assert self.moments is not None
        begun, ended = self.moments
        ended.wait()
        return self.launch_seconds / max(ended.since(begun), 1e-9)


@dataclass(eq=False)
class Recording:
    """In place of a network's `__call__`: a call's first evaluations are eager, then it is recorded, then replayed.

    `reach` gives what of a call's arguments the network can see, `known` the objects among them that are always the
    same, and `objection` why it must stay eager just now, "" for no reason; it and `reach` may raise Unrecordable.
    `agree` asks all ranks that share a forward: they record, replay and stay eager alike. `telling` hears when a
    recording begins, and when it is over.
    """

    network: nn.Module
    device: torch.device
    reach: Callable[[dict[str, Any]], dict[str, Any]] = lambda kwargs: kwargs
    known: Callable[[], Sequence[Any]] = tuple
    objection: Callable[[], str] = str
    telling: Callable[[bool], None] = lambda begins: None
    choice: GraphsChoice = "auto"
    agree: Agree = bool
    compiled: bool = False
    _held: OrderedDict[Hashable, _Recorded] = field(default_factory=OrderedDict)
    _trials: dict[Hashable, _Trial] = field(default_factory=dict)
    _gone: dict[Hashable, int] = field(default_factory=dict)  # what made place for others, and when it was wanted last
    _reasons: dict[str, None] = field(default_factory=dict)
    _evaluations: int = 0
    _replays: int = 0

    def __post_init__(self) -> None:
        self._recorder: Recorder | None = graphs.recorder_for(self.device)
        self._now: Now = now_on(self.device)
        # torch's own place for what is called instead of a module and its hooks.
        self.network._compiled_call_impl = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.choice == "off" or self._recorder is None:
            return self._plainly(args, kwargs)
        self._evaluations += 1
        try:
            if objection := self.objection():
                raise Unrecordable(objection)
            call = Call.of(args, self.reach(kwargs), self.device, self.known())
        except Unrecordable as reason:
            self._tell(str(reason))
            return self._plainly(args, kwargs)
        if recorded := self._held.get(call.key):
            self._held.move_to_end(call.key)
            self._replays += 1
            return recorded.replay(call.tensors)
        trial = self._trial(call.key)
        if trial.eager:
            return self._plainly(args, kwargs)
        if trial.evaluations < self._warm:
            return self._timed(trial, args, kwargs)
        if not self._pays(trial):
            return self._stay_eager(call, NOTHING_TO_GAIN, self._plainly(args, kwargs))
        if not self._has_place(call.key):
            self._tell(f"more than {KEYS} sizes, prompt lengths or the like take turns")
            return self._plainly(args, kwargs)
        return self._record(call, self._recorder)

    def drop(self) -> None:
        """Forget all recordings: weights have moved, or memory is wanted."""
        for state in (self._held, self._trials, self._gone):
            state.clear()
        self._recorder = graphs.recorder_for(self.device)  # the memory that recordings share goes with the last one

    @property
    def told(self) -> Graphs:
        held = list(self._held.values())
        nbytes = sum(recorded.nbytes for recorded in held)
        return Graphs(keys=len(held), replays=self._replays, bytes=nbytes, eager=tuple(self._reasons))

    @property
    def _warm(self) -> int:
        return (1 if self.choice == "on" else WARM) + self.compiled  # the first evaluation may compile

    def _plainly(self, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.network._call_impl(*args, **kwargs)

    def _tell(self, reason: str) -> None:
        self._reasons.setdefault(reason)
        _forget_oldest(self._reasons, TOLD)

    def _trial(self, key: Hashable) -> _Trial:
        if key not in self._trials:
            if self._held and self.agree(self._is_tight()):
                self.drop()
            self._trials[key] = _Trial()
            _forget_oldest(self._trials)
        return self._trials[key]

    def _timed(self, trial: _Trial, args: Any, kwargs: dict[str, Any]) -> Any:
        begun, started = self._now(), time.perf_counter()
        out = self._plainly(args, kwargs)
        trial.evaluations += 1  # one that was refused in its middle says nothing
        trial.launch_seconds = time.perf_counter() - started
        trial.moments = begun, self._now()
        return out

    def _pays(self, trial: _Trial) -> bool:
        return self.choice == "on" or self.agree(trial.launched > LAUNCHED)

    def _stay_eager(self, call: Call, reason: str, out: Any) -> Any:
        self._trials.setdefault(call.key, _Trial()).eager = True
        self._tell(reason)
        return out

    def _has_place(self, key: Hashable) -> bool:
        """For one more, in place of the one that was used least lately; not where these two only take turns."""
        if len(self._held) < KEYS:
            return True
        if self._evaluations - self._gone.get(key, -TURNS) < TURNS:
            self._gone[key] = self._evaluations
            return False
        oldest, _ = self._held.popitem(last=False)
        self._gone[oldest] = self._evaluations
        _forget_oldest(self._gone)
        return True

    def _record(self, call: Call, recorder: Recorder) -> Any:
        """A recording is believed when its first replay gave the bits of the evaluation itself, on every rank."""
        inputs = [_twin(tensor) for tensor in call.tensors]

        def run() -> Any:
            args, kwargs = call.on(inputs)
            return self._plainly(args, kwargs)

        self.telling(True)
        try:
            _fill(inputs, call.tensors)
            out = _copied(recorder.rehearse(run))
            recorded, reason = self._attempt(recorder, run, inputs, call)
            if self.agree(recorded is None):
                return self._stay_eager(call, reason or "another worker could not record it", out)
            assert recorded is not None
            reason = "" if _equal(recorded.replay(call.tensors), out) else "a replay of it gave other numbers"
            if self.agree(bool(reason)):
                return self._stay_eager(call, reason or "a replay on another worker gave other numbers", out)
        finally:
            self.telling(False)
        self._held[call.key] = recorded
        self._trials.pop(call.key)
        return out

    def _attempt(
        self, recorder: Recorder, run: Callable[[], Any], inputs: list[Tensor], call: Call
    ) -> tuple[_Recorded | None, str]:
        """The recording, or why there is none. Raises RuntimeError where the device is gone."""
        _fill(inputs, call.tensors)
        try:
            return _Recorded(recorder.record(run), inputs), ""
        except RuntimeError as error:
            first, *_ = (str(error) or type(error).__name__).splitlines()
            reason = f"recording it failed: {first[:200]}"
        if self.device.type != "cpu":
            try:
                torch.accelerator.synchronize(self.device)
                torch.accelerator.empty_cache()
            except RuntimeError as lost:
                raise RuntimeError(f"the device was lost while a forward was recorded ({reason})") from lost
        return None, reason

    def _is_tight(self) -> bool:
        """Would another evaluation by itself find less memory than recordings hold?"""
        held = self.told.bytes
        return self.device.type != "cpu" and free_bytes(self.device) + max(0, spare_bytes(self.device) - held) < held


def _forget_oldest(remembered: dict[Any, Any], most: int = SEEN) -> None:
    while len(remembered) > most:
        del remembered[next(iter(remembered))]


def _equal(one: Any, other: Any) -> bool:
    """To the bit: numbers that are none are equal to themselves."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) if torch.is_tensor(a) else a == b for a, b in pairs)
