"""Batch groups: ranks that divide the branches of guidance or a batch, without communication in the model.

Every group has all inputs, computes its share, and gathers all results, so callers see the undivided result. `dim` is
the dimension of the mesh along which the groups are: `cfg` for branches, `data` for a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from ..engine.comm.collectives import all_gather_v
from ..engine.comm.mesh import MeshDim
from ..engine.split.streams import chunk_range, chunk_sizes

PER_BATCH_OPTIONS = ("cond_or_uncond", "uuids")  # lists in transformer_options with one item for each joined batch


def data_parallel(dim: MeshDim, evaluate: Callable[..., Any], batch: int, *args: Any, **kwargs: Any) -> Any:
    """Calls `evaluate(*args, **kwargs)` with its entries divided over the groups: tensors [batch, ...], also in lists
    and dicts. It returns one such tensor, or a list of them.

    ComfyUI's transformer_options belong to the whole run and stay, except each entry's noise level and prompt.
    """
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
    if dim.size == 1:
        return local
    (full,) = all_gather_v(local, chunk_sizes(total, dim.parts), dim).wait()
    return full


def broadcast_if_unlike(dim: MeshDim, out: Any, source: int = 0) -> Any:
    """Returns the tensors of `out` as rank `source` of `dim` has them, where devices are of several kinds. Every rank
    computes the layers after the tokens are gathered, and such devices round differently there."""
    if dim.size == 1 or not dim.group_state.heterogeneous:
        return out

    def from_source(part: Tensor) -> Tensor:
        sizes = [len(part) * (index == source) for index in range(dim.size)]
        return all_gather_v(part[: sizes[dim.index]], sizes, dim).wait()[0]

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
    if "sample_sigmas" in value:
        return _options(value, entries, batch)
    return {name: select_entries(item, entries, batch) for name, item in value.items()}


def _options(options: dict[str, Any], entries: slice, batch: int) -> dict[str, Any]:
    selected = dict(options)
    if torch.is_tensor(options.get("sigmas")) and len(options["sigmas"]) == batch:
        selected["sigmas"] = options["sigmas"][entries]
    for name in PER_BATCH_OPTIONS:
        if per_batch := options.get(name):
            entries_per_cond = batch // len(per_batch)
            selected[name] = [per_batch[index // entries_per_cond] for index in range(batch)[entries]]
    return selected
