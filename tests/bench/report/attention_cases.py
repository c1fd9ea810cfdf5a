"""Measures every kernel and every division of a sequence: errors against float64, and times, beside one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.attention.dispatch import attend, check_backend
from parallel_runtime.engine.comm.mesh import ContextMesh, GroupState, build_mesh
from parallel_runtime.engine.split.streams import Streams
from parallel_runtime.request import BACKENDS, AttentionBackend, EngineOptions
from parallel_runtime.specs import Parallelism

from .measuring import Case, Measurement, Setting, clocked, mean_error

HEADS, HEAD_DIM = 24, 128
COMPARED_QUERIES = 512  # queries against float64: more would take all the time there is


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    shape = (1, setting.tokens, HEADS, HEAD_DIM)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]
    exact = _reference(inputs[0][:, :COMPARED_QUERIES], *inputs[1:])
    group_state = GroupState()
    for backend in BACKENDS:
        if (why := _missing(backend, device)) is None:
            yield from _of_backend(backend, inputs, exact, setting, device, group_state)
        elif setting.world_size == 1:
            yield Case({"what": backend}, partial(dict, note=f"not here: {why}"))


def parallelisms(world_size: int, backend: AttentionBackend = "auto") -> Iterator[tuple[str, Parallelism]]:
    """Yields every division of one sequence over this many ranks, with its description; none for one rank."""
    shapes = {(world_size, 1), (1, world_size)}
    if world_size % 2 == 0 and world_size > 2:
        shapes.add((2, world_size // 2))
    for ring, ulysses in sorted(shapes) if world_size > 1 else ():
        for method in ("alltoall", "allgather") if ring > 1 else ("alltoall",):
            words = f"ring {ring} x Ulysses {ulysses}" + (", allgather" if method == "allgather" else "")
            options = EngineOptions(rotate_method=cast(Any, method), attention_backend=backend)
            yield words, Parallelism(ring_degree=ring, ulysses_degree=ulysses, options=options)


def _of_backend(
    backend: AttentionBackend,
    inputs: list[Tensor],
    exact: Tensor,
    setting: Setting,
    device: torch.device,
    group_state: GroupState,
) -> Iterator[Case]:
    query, key, value = inputs
    labels = {"what": backend, "dtype": str(query.dtype).removeprefix("torch.")}

    def case(words: str, run: partial[Tensor], own: slice) -> Case:
        clock = None if setting.one_card else partial(clocked, run, device)
        return Case(labels | {"degrees": words}, partial(_judged, run, own, exact), clock)

    yield case("one process", partial(attend, query, key, value, None, None, backend), slice(0, COMPARED_QUERIES))
    for words, parallelism in parallelisms(setting.world_size, backend):
        mesh = build_mesh(parallelism, device, group_state)
        attention, own = _local_attention(mesh, parallelism, setting.tokens)
        yield case(words, partial(attention, query[:, own], key[:, own], value[:, own]), own)


def _judged(run: partial[Tensor], own: slice, exact: Tensor) -> Measurement:
    """Returns the error of this rank's part of the compared queries."""
    out, count = run(), max(0, min(own.stop, COMPARED_QUERIES) - own.start)
    return {"error": mean_error(out[:, :count], exact[:, own.start : own.start + count])}


def _missing(backend: AttentionBackend, device: torch.device) -> str | None:
    try:
        check_backend(backend, device)
    except (ValueError, RuntimeError) as missing:
        return " ".join(str(missing).split())
    return None


def _local_attention(mesh: ContextMesh, parallelism: Parallelism, tokens: int) -> tuple[ContextAttention, slice]:
    streams = Streams(mesh.context)
    streams.record_length("image", tokens, "report")
    start, size = streams.chunk("image")
    return ContextAttention(mesh, parallelism, streams, ("image",), ("image",)), slice(start, start + size)


def _reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (query, key, value))
    return ((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2)
