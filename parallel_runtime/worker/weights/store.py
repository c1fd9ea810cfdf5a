"""The weights of one network that come just before they are needed, one block ahead, into two buffers in turn; and
which modules those are: its blocks, and large layers outside of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..ranks import apart
from .slab import Slab

BLOCKS = 2  # buffers that blocks take in turn; layers outside of blocks share one more
KEPT = BLOCKS + 1  # what other ranks fetch, and this one need not
LARGE = 0.02  # of the model's weights: less is whole on every device


def released(memory: Tensor) -> None:
    """Nobody reads it before it is fetched into again. Tests put a function here that fills it with NaN."""


Arriving = Callable[[], object]  # waits for it


class Source(Protocol):
    """Where the bytes are at rest: of each slab this rank's part, which begins at `first`. `ranks` must divide a slab's
    size; `device_bytes` are those on this device. `staged`: they are fetched where a block runs, else they are there.
    """

    @property
    def ranks(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def staged(self) -> bool: ...
    def keep(self, slab: Slab, like: Tensor) -> None: ...
    def seal(self) -> list[Tensor]: ...
    def first(self, size: int) -> int: ...
    def fetch(self, part: Tensor, memory: Tensor) -> Arriving: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Unit:
    """A block, or a layer outside of blocks, with its `part` at rest; `before` it was changed for a while."""

    module: nn.Module
    slab: Slab
    slot: int
    part: Tensor
    before: Tensor | None = None


class Buffers:
    """Memory that units are fetched into: a few storages of a device, which all of its models use in turn, and what is
    in them. They grow and are given back while views of them stay what they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._there: dict[int, Unit] = {}  # by slot: what is in it, or on its way
        self._arriving: dict[int, Arriving] = {}

    def memory(self, slot: int, size: int) -> Tensor:
        """The first `size` bytes of a storage."""
        storage = self._storages.setdefault(slot, torch.UntypedStorage(0, device=self._device))
        if storage.nbytes() < size:
            storage.resize_(0)  # nothing worth copying
            storage.resize_(size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))

    def fetch(self, unit: Unit, source: Source) -> bool:
        """Begin to, where it is not there; returns whether it was not."""
        if self._there.get(unit.slot) is unit:
            return False
        self.arrive(unit.slot)
        self._there[unit.slot] = unit
        self._arriving[unit.slot] = source.fetch(unit.part, self.memory(unit.slot, unit.slab.size))
        return True

    def arrive(self, slot: int) -> None:
        """What is on its way there is there."""
        if wait := self._arriving.pop(slot, None):
            wait()

    def release(self, unit: Unit) -> None:
        """It has run."""
        if self._there.get(unit.slot) is unit:
            del self._there[unit.slot]
            released(self.memory(unit.slot, unit.slab.size))

    def rest(self) -> None:
        """What was fetched and not used is forgotten, so that all ranks begin the next job alike."""
        for slot in list(self._arriving):
            self.arrive(slot)
        self._there.clear()

    def give_back(self) -> None:
        """After `rest`. Until `memory` is asked for again, views of it must not be read."""
        for storage in self._storages.values():
            storage.resize_(0)


class Store:
    """Filled block by block with `put`, then `seal`ed, which is collective. From then on the parameters of its blocks
    are numbers only while their block runs. `skips(block)` says of a block that it will not compute this time."""

    def __init__(self, network: nn.Module, source: Source, buffers: Buffers) -> None:
        self.fetches = 0
        self.skips: Callable[[nn.Module], bool] = lambda block: False
        self._network = network
        self.source = source
        self._buffers = buffers
        self._units: list[Unit] = []
        self._handles: list[RemovableHandle] = []

    @property
    def away(self) -> list[Unit]:
        """What is fetched."""
        return [unit for unit in self._units if unit.slot != KEPT]

    @property
    def away_bytes(self) -> int:
        """Weights that are fetched."""
        return sum(unit.slab.nbytes for unit in self.away)

    @property
    def device_bytes(self) -> int:
        """What of them is at rest on this device."""
        return self.source.device_bytes

    def put(self, module: nn.Module, *, block: bool = True, kept: bool = False) -> None:
        """Take the parameters of `module` as they are; they have no memory then. `block`: one of those that run in
        the order in which they are put. `kept`: only other ranks fetch it, and here it stays as it is."""
        slab = Slab(module, self.source.ranks)
        like = torch.empty(0, dtype=torch.uint8, device=next(module.parameters()).device)
        self.source.keep(slab, like)
        if not kept:
            slab.empty()
        before = sum(unit.slot < BLOCKS for unit in self._units)
        self._units.append(Unit(module, slab, KEPT if kept else before % BLOCKS if block else BLOCKS, like))

    def seal(self) -> None:
        """All weights are here, those of the other ranks too. Collective."""
        if apart("".join(unit.slab.layout for unit in self._units).encode()):
            raise RuntimeError("the ranks laid out a model's weights in different ways")
        for unit, part in zip(self._units, self.source.seal(), strict=True):
            unit.part = part
        for unit in self.away:
            self._bind(unit)
        if self.away and self.source.staged:
            self._hook()

    def _hook(self) -> None:
        blocks = [unit for unit in self.away if unit.slot < BLOCKS]
        following = dict(pairwise(blocks))
        self._handles.append(self._network.register_forward_pre_hook(partial(self._begin, blocks[:1])))
        for unit in self.away:
            hook = partial(self._before, unit, following.get(unit))
            self._handles.append(unit.module.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(unit.module.register_forward_hook(partial(self._after, unit), always_call=True))

    def unit_of(self, module: nn.Module) -> Unit | None:
        """Whose slab the parameters of `module` are in, for `change`."""
        return next((unit for unit in self.away if any(module is each for each in unit.module.modules())), None)

    def change(self, unit: Unit, module: nn.Module, name: str) -> None:
        """Take another weight, of the same size, until `restore`: the parameter as it is now. For this rank alone,
        since those of other lanes may have others."""
        self._buffers.rest()
        if unit.before is None:
            unit.before, unit.part = unit.part, unit.part.clone()
        unit.slab.write(unit.part, self.source.first(unit.slab.size), (module, name))
        self._bind(unit)

    def restore(self) -> None:
        """The weights that were put, all of them."""
        self._buffers.rest()
        for unit in self._units:
            if unit.before is not None:
                unit.part, unit.before = unit.before, None
                self._bind(unit)

    def close(self) -> None:
        """The parameters are of no use any more."""
        self._buffers.rest()
        for handle in self._handles:
            handle.remove()
        self._units.clear()
        self.source.close()

    def _bind(self, unit: Unit) -> None:
        unit.slab.bind(self._buffers.memory(unit.slot, unit.slab.size) if self.source.staged else unit.part)

    @torch.compiler.disable
    def _begin(self, first: Sequence[Unit], *_: Any) -> None:
        for slot in {unit.slot for unit in self.away}:
            self._buffers.memory(slot, max(unit.slab.size for unit in self.away if unit.slot == slot))
        for unit in first:
            self._start(unit)

    @torch.compiler.disable
    def _before(self, unit: Unit, following: Unit | None, module: nn.Module, _: Any) -> None:
        if self.skips(module):
            return
        self._start(unit)
        self._buffers.arrive(unit.slot)
        if following is not None:
            self._start(following)

    @torch.compiler.disable
    def _after(self, unit: Unit, module: nn.Module, *_: Any) -> None:
        if not self.skips(module):
            self._buffers.release(unit)

    def _start(self, unit: Unit) -> None:
        self.fetches += self._buffers.fetch(unit, self.source)


def fetched_of(blocks: list[nn.Module], resident: int, residents: Collection[int] = ()) -> list[nn.Module]:
    """Without `resident` ones, which are spread evenly. Where other ranks have other numbers, `residents`, each has all
    that one with fewer has: what nobody fetches need not be at rest anywhere else."""
    here = blocks
    for count in sorted({resident, *residents}, reverse=True):
        if count >= resident:
            here = _spread(here, count)
    return [block for block in blocks if not any(block is one for one in here)]


def _spread(blocks: list[nn.Module], count: int) -> list[nn.Module]:
    """So many of them, evenly."""
    total = len(blocks)
    return [block for number, block in enumerate(blocks) if (number + 1) * count // total != number * count // total]


def large_layers(network: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Layers outside of `blocks` whose weights count."""
    inside = {id(module) for block in blocks for module in block.modules()}
    least = LARGE * weight_bytes(network)
    layers = [module for module in network.modules() if not list(module.children()) and id(module) not in inside]
    return [layer for layer in layers if weight_bytes(layer) > least]


def weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
