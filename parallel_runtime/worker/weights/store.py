"""The weights of one network that come just before they are needed, one block ahead, into two buffers in turn; and
which modules those are: its blocks, and large layers outside of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..ranks import everybodys
from .slab import Slab

BLOCKS = 2  # buffers that blocks take in turn; layers outside of blocks share one more
KEPT = BLOCKS + 1  # what other ranks fetch, and this one need not
LARGE = 0.02  # of the model's weights: less is whole on every device


def released(memory: Tensor) -> None:
    """Nobody reads it before it is fetched into again. Tests put a function here that fills it with NaN."""


class Arriving(Protocol):
    def wait(self) -> object: ...


class Source(Protocol):
    """Where the bytes are at rest. `ranks` must divide a slab's size; `device_bytes` are those on this device."""

    @property
    def ranks(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    def keep(self, slab: Slab, like: Tensor) -> None: ...
    def seal(self) -> None: ...
    def at_rest(self, number: int) -> Tensor | None: ...
    def change(self, number: int, module: nn.Module, name: str, slab: Slab) -> None: ...
    def restore(self) -> list[int]: ...
    def fetch(self, number: int, memory: Tensor) -> Arriving: ...
    def close(self) -> None: ...


class Buffers:
    """Memory that blocks are fetched into: a few storages of a device, which all of its models use in turn. They grow
    and are given back while views of them stay what they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}

    def memory(self, number: int, size: int) -> Tensor:
        """The first `size` bytes of storage `number`."""
        storage = self._storages.setdefault(number, torch.UntypedStorage(0, device=self._device))
        if storage.nbytes() < size:
            storage.resize_(0)  # nothing worth copying
            storage.resize_(size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))

    def give_back(self) -> None:
        """Until `memory` is asked for again, views of it must not be read."""
        for storage in self._storages.values():
            storage.resize_(0)


class Store:
    """Filled block by block with `put`, then `seal`ed, which is collective. From then on the parameters of its blocks
    are numbers only while their block runs. `skips(block)` says of a block that it will not compute this time."""

    def __init__(self, network: nn.Module, source: Source, buffers: Buffers) -> None:
        self.fetches = 0
        self.skips: Callable[[nn.Module], bool] = lambda block: False
        self._network = network
        self._source = source
        self._buffers = buffers
        self._modules: list[nn.Module] = []
        self._slabs: list[Slab] = []
        self._slots: list[int] = []
        self._there: dict[int, int] = {}  # slot to the slab that is in it or on its way
        self._arriving: dict[int, Arriving] = {}
        self._handles: list[RemovableHandle] = []

    @property
    def away_bytes(self) -> int:
        """Weights that are fetched."""
        return sum(slab.nbytes for slab, slot in zip(self._slabs, self._slots, strict=True) if slot != KEPT)

    @property
    def device_bytes(self) -> int:
        """What of them is at rest on this device."""
        return self._source.device_bytes

    def put(self, module: nn.Module, *, block: bool = True, kept: bool = False) -> None:
        """Take the parameters of `module` as they are; they have no memory then. `block`: one of those that run in
        the order in which they are put. `kept`: only other ranks fetch it, and here it stays as it is."""
        slab = Slab(module, self._source.ranks)
        self._source.keep(slab, torch.empty(0, dtype=torch.uint8, device=next(module.parameters()).device))
        if not kept:
            slab.empty()
        before = sum(slot < BLOCKS for slot in self._slots)
        self._modules.append(module)
        self._slabs.append(slab)
        self._slots.append(KEPT if kept else before % BLOCKS if block else BLOCKS)

    def seal(self) -> None:
        """All weights are here, those of the other ranks too. Collective."""
        layouts = hashlib.sha256("".join(slab.layout for slab in self._slabs).encode())
        if len(set(everybodys(int.from_bytes(layouts.digest()[:7], "big")))) > 1:
            raise RuntimeError("the ranks laid out a model's weights in different ways")
        self._source.seal()
        taken = [number for number, slot in enumerate(self._slots) if slot != KEPT]
        for number in taken:
            self._bind(number)
        away = [number for number in taken if self._source.at_rest(number) is None]
        blocks = [number for number in away if self._slots[number] < BLOCKS]
        following = dict(pairwise(blocks))
        if away:
            self._handles.append(self._network.register_forward_pre_hook(partial(self._begin, blocks[:1])))
        for number in away:
            module, hook = self._modules[number], partial(self._before, number, following.get(number))
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(module.register_forward_hook(partial(self._after, number), always_call=True))

    def number_of(self, module: nn.Module) -> int | None:
        """Of the slab that the parameters of `module` are in, for `change`."""
        within = (number for number, block in enumerate(self._modules) if any(module is m for m in block.modules()))
        return next((number for number in within if self._slots[number] != KEPT), None)

    def change(self, number: int, module: nn.Module, name: str) -> None:
        """Take another weight, of the same size, until `restore`: the parameter as it is now."""
        self.rest()
        self._source.change(number, module, name, self._slabs[number])
        self._bind(number)

    def restore(self) -> None:
        """The weights that were put, all of them."""
        self.rest()
        for number in self._source.restore():
            self._bind(number)

    def rest(self) -> None:
        """After a job: what was fetched and not used is forgotten, so that all ranks begin the next one alike."""
        for arriving in self._arriving.values():
            arriving.wait()
        self._arriving.clear()
        self._there.clear()

    def close(self) -> None:
        """The parameters are of no use any more."""
        self.rest()
        for handle in self._handles:
            handle.remove()
        self._source.close()

    def _bind(self, number: int) -> None:
        at_rest = self._source.at_rest(number)
        self._slabs[number].bind(self._memory(number) if at_rest is None else at_rest)

    def _memory(self, number: int) -> Tensor:
        return self._buffers.memory(self._slots[number], self._slabs[number].size)

    @torch.compiler.disable
    def _begin(self, first: Sequence[int], *_: Any) -> None:
        for slot in set(self._slots) - {KEPT}:
            sizes = [slab.size for slab, of in zip(self._slabs, self._slots, strict=True) if of == slot]
            self._buffers.memory(slot, max(sizes))
        for number in first:
            self._start(number)

    @torch.compiler.disable
    def _before(self, number: int, following: int | None, module: nn.Module, _: Any) -> None:
        if self.skips(module):
            return
        self._start(number)
        if arriving := self._arriving.pop(self._slots[number], None):
            arriving.wait()
        if following is not None:
            self._start(following)

    @torch.compiler.disable
    def _after(self, number: int, module: nn.Module, *_: Any) -> None:
        if self._there.get(self._slots[number]) == number and not self.skips(module):
            del self._there[self._slots[number]]
            released(self._memory(number))

    def _start(self, number: int) -> None:
        slot = self._slots[number]
        if self._there.get(slot) == number:
            return
        if arriving := self._arriving.pop(slot, None):
            arriving.wait()
        self._there[slot] = number
        self._arriving[slot] = self._source.fetch(number, self._memory(number))
        self.fetches += 1


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
