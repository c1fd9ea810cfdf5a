"""Batch groups: ranks that divide the branches of guidance or a batch, without communication in the model; and random
numbers that all ranks draw alike.

Every group has all inputs, computes its share, and gathers all results, so callers see the undivided result. `dim` is
the dimension of the mesh along which the groups are: `cfg` for branches, `data` for a batch."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from ..engine.comm.collectives import all_gather_int, all_gather_v
from ..engine.comm.mesh import GroupState, MeshDim, comm_device_of, mesh_dim_of
from ..engine.comm.ranks import rank
from ..engine.split.streams import chunk_range, chunk_sizes
from ..loading.random_states import generator_kind

log = logging.getLogger(__name__)

PER_BATCH_OPTIONS = ("cond_or_uncond", "uuids")  # lists in transformer_options with one item for each joined batch


def data_parallel(dim: MeshDim, evaluate: Callable[..., Any], batch: int, *args: Any, **kwargs: Any) -> Any:
    """Calls `evaluate(*args, **kwargs)` with its entries divided over the groups: tensors [batch, ...], also in lists
    and dicts. It returns one such tensor, or a list of them.

    ComfyUI's transformer_options belong to the whole run and stay, except each entry's noise level and prompt."""
    if dim.size == 1:
        return evaluate(*args, **kwargs)
    items, entries = local_items(dim, batch), local_entries(dim, batch)
    out = evaluate(*select_entries(args, entries, batch), **select_entries(kwargs, entries, batch))
    return tree_map_only(Tensor, lambda part: all_gather(dim, part[: len(items)], batch), out)


def local_items(dim: MeshDim, total: int) -> range:
    """Returns which of `total` items this group computes: contiguous, by the groups' shares, possibly none."""
    start, size = chunk_range(total, dim.parts, dim.index)
    return range(start, start + size)


def local_entries(dim: MeshDim, total: int) -> slice:
    """Returns `local_items` as a slice; a group without items computes the first one for the output's shape."""
    items = local_items(dim, total)
    return slice(items.start, items.stop) if items else slice(0, 1)


def all_gather(dim: MeshDim, local: Tensor, total: int) -> Tensor:
    """Gathers each group's [local items, ...] into [total, ...], in order."""
    return local if dim.size == 1 else all_gather_v(local, chunk_sizes(total, dim.parts), dim)


def broadcast_if_unlike(dim: MeshDim, out: Any, source: int = 0) -> Any:
    """Returns the tensors of `out` as rank `source` of `dim` has them, where devices are of several kinds."""
    # Every rank computes the layers after the tokens are gathered, and such devices round differently there.
    if dim.size == 1 or not dim.group_state.heterogeneous:
        return out

    def from_source(part: Tensor) -> Tensor:
        sizes = [len(part) * (index == source) for index in range(dim.size)]
        return all_gather_v(part[: sizes[dim.index]], sizes, dim)

    return tree_map_only(Tensor, from_source, out)


def entry_by_entry(evaluate: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Calls `evaluate(x, *args, **kwargs)` entry by entry, so that several pipeline stages work at once."""
    if x.shape[0] == 1:
        return evaluate(x, *args, **kwargs)
    parts = []
    for index in range(x.shape[0]):
        entry = slice(index, index + 1)
        parts.append(evaluate(*select_entries((x, *args), entry, len(x)), **select_entries(kwargs, entry, len(x))))
    return tree_map(lambda *entries: torch.cat(entries), *parts)


def select_entries(value: Any, entries: slice, batch: int) -> Any:
    """Returns `value` with only these `entries` of every tensor [batch, ...] in it, also in lists and dicts."""
    if torch.is_tensor(value):
        return value[entries] if value.ndim and value.shape[0] == batch else value
    if isinstance(value, list | tuple):
        return type(value)(select_entries(item, entries, batch) for item in value)
    if type(value) is not dict:
        return value
    if "sample_sigmas" not in value:
        return {name: select_entries(item, entries, batch) for name, item in value.items()}
    selected = dict(value)  # transformer_options
    if torch.is_tensor(value.get("sigmas")) and len(value["sigmas"]) == batch:
        selected["sigmas"] = value["sigmas"][entries]
    for name in PER_BATCH_OPTIONS:
        if per_batch := value.get(name):
            entries_per_cond = batch // len(per_batch)
            selected[name] = [per_batch[index // entries_per_cond] for index in range(batch)[entries]]
    return selected


DRAWING = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal",
    "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
    "uniform_",
)  # fmt: skip
FUNCTIONS = frozenset(
    function for owner in (torch, Tensor) for name in DRAWING if (function := getattr(owner, name, None)) is not None
)


# A large tensor's random numbers depend on the number of a GPU's processors: samplers that draw noise on the device
# (ancestral ones, lcm, sde_gpu) would have another latent on each rank.
class SamplerNoise(TorchFunctionMode):
    """While it is entered, what a sampler draws on this rank's `device` are the numbers of the first rank whose device
    is of the `kind` of ComfyUI's own; of rank 0 where none is, which the log says once. Collective where the ranks'
    devices differ; otherwise each draws its own, which are the same."""

    def __init__(self, device: torch.device, kind: str, group_state: GroupState) -> None:
        super().__init__()
        self._device, self._kind, self._group_state = device, kind, group_state
        own = generator_kind(device)
        alike = all_gather_int(int(own == kind)) if group_state.heterogeneous else [int(own == kind)]
        self._is_comfyuis = any(alike)
        self._source = alike.index(1) if self._is_comfyuis else 0
        self._entered = False

    def __enter__(self) -> Self:
        self._entered = self._group_state.heterogeneous or not self._is_comfyuis
        return super().__enter__() if self._entered else self

    def __exit__(self, *error: Any) -> None:
        if self._entered:
            self._entered = False
            super().__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets each rank draw its own numbers: in the network every rank has other tokens."""
        entered = self._entered
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            if entered:
                self.__enter__()

    def __torch_function__(
        self, function: Callable[..., Any], _: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        drawn = function(*args, **(kwargs or {}))
        if function not in FUNCTIONS or drawn.device.type != self._device.type or not drawn.numel():
            return drawn
        if not self._is_comfyuis and rank() == 0:
            log.warning(
                "[CP] the sampler draws noise on %s: on ComfyUI's device, %s, it would draw other numbers",
                generator_kind(self._device), self._kind,
            )  # fmt: skip
        self._is_comfyuis = True  # is said once
        if not self._group_state.heterogeneous:
            return drawn
        assert dist.group.WORLD is not None
        world = mesh_dim_of(dist.group.WORLD, comm_device_of(self._device), self._group_state)
        return drawn.copy_(broadcast_if_unlike(world, drawn.reshape(-1), self._source).view_as(drawn))
