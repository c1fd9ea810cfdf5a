"""Fetches the weights of one network just before they are needed, one block ahead, into two buffers in turn; and says
which modules to fetch from where."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..specs import BLOCK_BUFFERS, WeightPlacement
from .comm.collectives import differing_ranks
from .comm.mesh import MeshDim
from .comm.ranks import machine_ranks, rank
from .weight_sources import FlatBlock, HostWeights, ShardedWeights, Wait, WeightSource

LAYER_BUFFER = BLOCK_BUFFERS  # the one that layers outside of blocks share
NOT_FETCHED = LAYER_BUFFER + 1  # instead of a buffer, for a module that only other ranks fetch


@dataclass(eq=False)
class FetchedModule:
    """A block, or a layer outside of blocks, and this rank's stored `part` of it. `original_part` is another one where
    its weights are overridden; `overrides` are replaced weights of another dtype, which have no place in the layout."""

    module: nn.Module
    flat_block: FlatBlock
    buffer: int
    part: Tensor
    original_part: Tensor
    overrides: dict[tuple[nn.Module, str], nn.Parameter] = field(default_factory=dict)


class Buffers:
    """Memory that modules are fetched into: a few storages of a device, which all of its models use in turn, and their
    contents. Storages grow and are freed while views of them stay valid objects."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._contents: dict[int, FetchedModule] = {}  # by buffer: the module in it, or being fetched
        self._pending: dict[int, Wait] = {}

    def view(self, buffer: int, size: int) -> Tensor:
        """Returns the first `size` bytes of a storage."""
        storage = self._storages.setdefault(buffer, torch.UntypedStorage(0, device=self._device))
        if storage.nbytes() < size:
            self._contents.pop(buffer, None)
            storage.resize_(0)  # old contents need not be copied
            storage.resize_(size)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))

    def fetch(self, entry: FetchedModule, source: WeightSource) -> None:
        """Starts to fetch a module that is not in its buffer."""
        if self._contents.get(entry.buffer) is entry:
            return
        self.wait(entry.buffer)
        memory = self.view(entry.buffer, entry.flat_block.padded_bytes)
        self._contents[entry.buffer] = entry
        self._pending[entry.buffer] = source.fetch(entry.part, memory)

    def wait(self, buffer: int) -> None:
        """Waits for the fetch into `buffer`, if any."""
        if wait := self._pending.pop(buffer, None):
            wait()

    def discard_fetched(self) -> None:
        """Forgets what was fetched, so that all ranks begin the next job in the same state."""
        for buffer in list(self._pending):
            self.wait(buffer)
        self._contents.clear()

    def free(self) -> None:
        """Frees the storages, after `discard_fetched`. Views must not be read until the next call of `view`."""
        for storage in self._storages.values():
            storage.resize_(0)


class BlockPrefetcher:
    """Fetches modules before they run. After `add` for each and `seal`, which is collective, their parameters have
    values only while the module runs. `is_skipped(block)` says whether a block will not compute in this evaluation."""

    def __init__(self, network: nn.Module, source: WeightSource, buffers: Buffers) -> None:
        self.is_skipped: Callable[[nn.Module], bool] = lambda block: False
        self._network = network
        self.source = source
        self._buffers = buffers
        self._modules: list[FetchedModule] = []
        self._order: list[FetchedModule] = []  # the fetched blocks
        self._ran: dict[FetchedModule, None] = {}  # blocks of the latest evaluation, in the order in which they ran
        self._handles: list[RemovableHandle] = []

    @property
    def offloaded(self) -> list[FetchedModule]:
        return [entry for entry in self._modules if entry.buffer != NOT_FETCHED]

    @property
    def nonresident_bytes(self) -> int:
        """Returns the bytes of the weights that this rank fetches, without those that it stores on its device."""
        return sum(entry.flat_block.nbytes for entry in self.offloaded) - self.source.device_bytes

    def add(self, module: nn.Module, *, block: bool = True, resident: bool = False) -> None:
        """Stores the parameters of `module` and frees their memory. `block`: one of those that run in turn. `resident`:
        only other ranks fetch it, and here it stays as it is."""
        flat_block = FlatBlock(module, self.source.ranks)
        like = torch.empty(0, dtype=torch.uint8, device=next(module.parameters()).device)
        self.source.store(flat_block, like)
        if not resident:
            flat_block.drop_storage()
        buffer = NOT_FETCHED if resident else 0 if block else LAYER_BUFFER
        self._modules.append(FetchedModule(module, flat_block, buffer, like, like))

    def seal(self) -> None:
        """Waits until all ranks have stored their weights. Collective."""
        if differing_ranks(*(entry.flat_block.layout for entry in self._modules), dim=self.source.dim):
            raise RuntimeError("the ranks laid out a model's weights in different ways")
        for entry, part in zip(self._modules, self.source.seal(), strict=True):
            entry.part = entry.original_part = part
        self._run_in([entry for entry in self.offloaded if entry.buffer != LAYER_BUFFER])
        if self.offloaded and self.source.staged:
            self._handles.append(self._network.register_forward_pre_hook(self.begin))
            for entry in self.offloaded:
                hook = partial(self._before_block, entry)
                self._handles.append(entry.module.register_forward_pre_hook(hook, prepend=True))

    def _run_in(self, order: list[FetchedModule]) -> None:
        """Gives the blocks, which run in this `order`, the buffers in turn."""
        self._buffers.discard_fetched()
        self._order, self._following = order, dict(pairwise(order))
        for number, entry in enumerate(order):
            entry.buffer = number % BLOCK_BUFFERS
        for entry in self.offloaded:
            self._bind(entry)

    def find_fetched(self, module: nn.Module) -> FetchedModule | None:
        """Returns the fetched module that contains `module`, for `override_weight`."""
        return next((entry for entry in self.offloaded if module in entry.module.modules()), None)

    def override_weight(self, entry: FetchedModule, module: nn.Module, name: str) -> None:
        """Uses the parameter as it is now, of the same shape, until `restore_weights`; on this rank alone."""
        self._buffers.discard_fetched()
        if not entry.flat_block.dtype_matches(module, name):
            entry.overrides[module, name] = getattr(module, name)
            self._bind(entry)
            return
        if entry.part is entry.original_part:
            entry.part = entry.part.clone()
        entry.flat_block.write(entry.part, self.source.first_byte(entry.flat_block.padded_bytes), (module, name))
        self._bind(entry)

    def restore_weights(self) -> None:
        """Restores all weights as they were added."""
        self._buffers.discard_fetched()
        for entry in self.offloaded:
            if entry.part is not entry.original_part or entry.overrides:
                entry.part = entry.original_part
                entry.overrides.clear()
                self._bind(entry)

    def close(self) -> None:
        """Removes hooks and stored weights; the parameters must not be used any more."""
        self._buffers.discard_fetched()
        for handle in self._handles:
            handle.remove()
        self._modules.clear()
        self.source.close()

    def _bind(self, entry: FetchedModule) -> None:
        size = entry.flat_block.padded_bytes
        entry.flat_block.bind(self._buffers.view(entry.buffer, size) if self.source.staged else entry.part)
        for (module, name), weight in entry.overrides.items():
            module._parameters[name] = weight

    @torch.compiler.disable
    def begin(self, *_: Any) -> None:
        """Makes room for the blocks of an evaluation, and fetches the first one."""
        # In the order of adding at first, then as they ran in the evaluation before: blocks of two stacks take turns.
        ran, self._ran = list(self._ran), {}
        if len(ran) == len(self._order) and ran != self._order:
            self._run_in(ran)
        for buffer in {entry.buffer for entry in self.offloaded}:
            sizes = [entry.flat_block.padded_bytes for entry in self.offloaded if entry.buffer == buffer]
            self._buffers.view(buffer, max(sizes))
        for entry in self._order[:1]:
            self._buffers.fetch(entry, self.source)

    @torch.compiler.disable
    def _before_block(self, entry: FetchedModule, module: nn.Module, _: Any) -> None:
        if self.is_skipped(module):
            return
        self._buffers.fetch(entry, self.source)
        self._buffers.wait(entry.buffer)
        if entry.buffer == LAYER_BUFFER:
            return
        self._ran.setdefault(entry)
        # Into the other buffer, while this block computes.
        if (following := self._following.get(entry)) is not None:
            self._buffers.fetch(following, self.source)


@dataclass(frozen=True, eq=False)
class RankPlacement:
    """How this rank places weights: `resident_blocks` are fully on its device, of all others only `local_fraction`.
    `resident_counts` are the numbers of resident blocks of all ranks."""

    resident_blocks: int
    resident_counts: frozenset[int]
    local_fraction: float
    source: Callable[[], WeightSource]
    buffers: Buffers


def rank_placement(
    placement: WeightPlacement, mesh_dim: MeshDim, device: torch.device, buffers: Buffers
) -> RankPlacement | None:
    """Returns None where all weights are on every device. `mesh_dim`: the ranks of the shards, with their own group."""
    counts = frozenset(placement.resident_blocks_by_rank or (placement.resident_blocks,))
    if placement.mode == "offload":
        resident, staged = placement.resident_blocks_on(rank()), device.type != "cpu"
        source = partial(HostWeights, device, machine_ranks(), rank(), staged=staged)
        return RankPlacement(resident, counts, 0.0, source, buffers)
    if placement.mode == "shard" and mesh_dim.size > 1:
        shares = placement.shard_shares
        parts = tuple(shares[peer] if shares else 1 for peer in mesh_dim.ranks)
        mesh_dim = replace(mesh_dim, shares=parts)
        fraction = parts[mesh_dim.index] / sum(parts)
        return RankPlacement(placement.resident_blocks, counts, fraction, lambda: ShardedWeights(mesh_dim), buffers)
    return None


def offloaded_blocks(blocks: list[nn.Module], resident: int, residents: Collection[int] = ()) -> list[nn.Module]:
    """Returns `blocks` without `resident` ones, which are evenly spaced. A rank's include those of every rank with
    fewer, of the numbers `residents`, so that a block that no rank fetches need not be stored."""
    resident_blocks = blocks
    for count in sorted({count for count in (resident, *residents) if count >= resident}, reverse=True):
        total, numbered = len(resident_blocks), enumerate(resident_blocks)
        resident_blocks = [block for n, block in numbered if (n + 1) * count // total != n * count // total]
    return [block for block in blocks if block not in resident_blocks]
