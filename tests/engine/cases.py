"""Cases that ranks run on the attention itself. Errors are max |difference| over the reference's standard deviation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.engine.attention import ring_and_ulysses
from parallel_runtime.engine.attention.context_attention import ContextAttention, gather_key_mask
from parallel_runtime.engine.attention.dispatch import attend
from parallel_runtime.engine.comm import collectives
from parallel_runtime.engine.comm.mesh import ContextMesh, MeshDim
from parallel_runtime.engine.split.streams import Streams, chunk_range
from parallel_runtime.specs import Parallelism

from .meshes import mesh, parallelism, staged_mesh
from .reference import Problem, attention, random_problem

MASK_FORMS = ("2d bool", "2d int", "4d bool", "4d -inf", "4d -1e4", "whole 2d bool", "whole 4d bool")


def random_errors(
    rank: int, world: int, degrees: list[int], seeds: list[int], options: dict[str, Any], grouped: bool = False
) -> list[float]:
    """Errors of this rank's rows on random problems, every spare buffer full of NaN."""
    collectives.empty = collectives.zeros = nan_filled
    try:
        problems = {seed: random_problem(seed, grouped=grouped) for seed in seeds}
        return [_error(mesh(*degrees), problem, seed, degrees, options) for seed, problem in problems.items()]
    finally:
        collectives.empty, collectives.zeros = torch.empty, torch.zeros


def chunked_errors(rank: int, world: int, degrees: list[int], seeds: list[int], grouped: bool) -> list[float]:
    """The same where heads travel in chunks, as they do where much is sent."""
    worth, ring_and_ulysses.MIN_HIDDEN_BYTES = ring_and_ulysses.MIN_HIDDEN_BYTES, 0
    try:
        return random_errors(rank, world, degrees, seeds, {}, grouped)
    finally:
        ring_and_ulysses.MIN_HIDDEN_BYTES = worth


def errors_of_layers(rank: int, world: int, degrees: list[int], seed: int) -> list[float]:
    """Three layers of one forward, of other tokens each and the last of another mask, in memory that they share."""
    collectives.empty = collectives.zeros = nan_filled
    try:
        place, problem = mesh(*degrees), random_problem(seed, masked=True)
        attend_together = together(problem, place, parallelism(*degrees))
        mask, errors = masked_as(problem, "4d bool", place), []
        for layer in range(3):
            if layer == 2:
                problem = replace(problem, mask=problem.mask.flip(0))  # type: ignore[union-attr]
                mask = masked_as(problem, "4d bool", place)
            problem = replace(problem, query=problem.query.flip(1), key=-problem.key, value=problem.value + layer)
            q, k, v = (own(tensor, problem, place) for tensor in (problem.query, problem.key, problem.value))
            errors.append(_compare(attend_together(q, k, v, mask), problem, place))
        return errors
    finally:
        collectives.empty, collectives.zeros = torch.empty, torch.zeros


def mask_exchanges(rank: int, world: int, degrees: list[int]) -> list[int]:
    """Batches of messages of layers with no mask, with one, with the same again, and with views and copies of it."""
    place, problem = mesh(*degrees), random_problem(4, masked=True)
    attend_together = together(problem, place, parallelism(*degrees))
    q, k, v = (own(tensor, problem, place) for tensor in (problem.query, problem.key, problem.value))
    mask = masked_as(problem, "4d bool", place)
    given = [None, mask, mask, mask[:], mask.clone()]
    return [counted_collectives(lambda mask=mask: attend_together(q, k, v, mask))[1] for mask in given]  # type: ignore[misc]


def staged_errors(rank: int, world: int, degrees: list[int], seeds: list[int]) -> list[float]:
    """Errors where tensors are staged on their way to a collective."""
    return [_error(staged_mesh(*degrees), random_problem(seed), seed, degrees, {}) for seed in seeds]


def local_errors(rank: int, world: int, degrees: list[int], seeds: list[int]) -> list[float]:
    """The same problems with attention over this rank's tokens only: what the tests must not take for exact."""
    errors = []
    for seed in seeds:
        problem = random_problem(seed, masked=False)
        q, k, v = (own(tensor, problem, mesh(*degrees)) for tensor in (problem.query, problem.key, problem.value))
        errors.append(_compare(attend(q, k, v, None, None, "native"), problem, mesh(*degrees)))
    return errors


def low_precision_errors(rank: int, world: int, degrees: list[int], dtype: str, in_fp32: bool) -> list[float]:
    """[mean error of these ranks, of one process] in `dtype`, both against float64 on the rounded inputs."""
    problem = random_problem(5, masked=False)
    q, k, v = (tensor.to(getattr(torch, dtype)) for tensor in (problem.query, problem.key, problem.value))
    problem = Problem(problem.text, problem.image, q, k, v, None)
    reference = attention(problem)
    got = run(problem, degrees, None, {"convert_to_fp32": in_fp32})
    assert got.dtype == q.dtype
    alone = attend(q, k, v, None, None, "native")
    expected = [own(tensor, problem, mesh(*degrees)).double() for tensor in (reference, alone)]
    return [float((tensor - expected[0]).abs().mean()) for tensor in (got.double(), expected[1])]


def rows_without_keys(rank: int, world: int, degrees: list[int]) -> float:
    """One item of the batch has no key at all: its rows are zero, the other's exact."""
    problem = random_problem(3, masked=True)
    q, k, v = (torch.cat([t, t])[:2] for t in (problem.query, problem.key, problem.value))
    mask = torch.stack([problem.mask[0], torch.zeros_like(problem.mask[0])])  # type: ignore[index]
    problem = Problem(problem.text, problem.image, q, k, v, mask)
    own_mask = masked_as(problem, "4d bool", mesh(*degrees))
    return _compare(run(problem, degrees, own_mask, {}), problem, mesh(*degrees))


def hidden_beyond_the_dtype(rank: int, world: int, dtype: str, hidden: float) -> float:
    """The error of a ring in `dtype` whose float32 mask hides the keys of the second rank by `hidden`."""
    generator, places = torch.Generator().manual_seed(0), torch.arange(16)
    seen = ((places < 9) & (places != 1))[None]  # the first rank has text 0 and image 2 to 8
    q, k, v = (torch.randn(1, 16, 2, 32, generator=generator).to(getattr(torch, dtype)) for _ in range(3))
    problem, place = Problem(2, 14, q, k, v, seen), mesh(2, 1)
    mask = own(torch.zeros(1, 16).masked_fill(~seen, hidden), problem, place)[:, None, None, :]
    return _compare(run(problem, [2, 1], mask, {}), problem, place)


def started_collectives(rank: int, world: int, degrees: list[int], method: str) -> list[int]:
    """[all-to-alls, batches of messages, messages] that one attention without a mask starts."""
    return counted_collectives(
        lambda: run(random_problem(2, masked=False), degrees, None, {"rotate_method": method}),
    )


def sent_bytes(rank: int, world: int, degrees: list[int], dtype: str, method: str) -> list[int]:
    """Bytes that one attention sends with `comm_dtype` same, and with float8_e4m3fn."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 48, 4, 64, generator=generator).to(getattr(torch, dtype)) for _ in range(3))
    problem = Problem(12, 36, q, k, v, None)
    return [
        _bytes_of(partial(run, problem, degrees, None, {"rotate_method": method, "comm_dtype": sent}))
        for sent in ("same", "float8_e4m3fn")
    ]


def _bytes_of(call: Callable[[], Any]) -> int:
    counts = [0]
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_exchange(received: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[0] += sent.nbytes
        return all_to_all(received, sent, *args, **kwargs)

    def counted_batch(operations: list[dist.P2POp]) -> Any:
        counts[0] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return batch(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counted_exchange, counted_batch  # type: ignore[assignment]
    try:
        call()
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch
    return counts[0]


def counted_collectives(call: Callable[[], Any]) -> list[int]:
    counts = [0, 0, 0]
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_exchange(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        return all_to_all(*args, **kwargs)

    def counted_batch(operations: list[dist.P2POp]) -> Any:
        counts[1] += 1
        counts[2] += len(operations)
        return batch(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counted_exchange, counted_batch  # type: ignore[assignment]
    try:
        call()
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch
    return counts


def masks_follow_their_owner(rank: int, world: int, degrees: list[int]) -> None:
    """A mask that says which rank holds which key, of lengths that cut unevenly, arrives in the order of the keys."""
    place = mesh(*degrees).context
    lengths = [5, 11]
    full = torch.arange(16.0)[None]
    ranges = [chunk_range(length, place.parts, index) for index in range(place.size) for length in lengths]
    expected = [start + offset + place for (start, size), offset in zip(ranges, [0, 5] * place.size, strict=True)
                for place in range(size)]  # fmt: skip
    streams = Streams(place)
    for name, length in zip(("text", "image"), lengths, strict=True):
        streams.record_length(name, length, "test")
    for given in (full, torch.tensor([_own_values(lengths, place)])):
        keys = gather_key_mask(given, 1, 1, streams, ("text", "image"), place).pairs
        assert keys.flatten().tolist() == expected, (given, keys.flatten().tolist())


def run(
    problem: Problem, degrees: list[int], mask: Tensor | None, options: dict[str, Any], place: ContextMesh | None = None
) -> Tensor:
    """This rank's rows of the parallel attention; those of stand-ins are zero."""
    place = place or mesh(*degrees)
    attend_together = together(problem, place, parallelism(*degrees, **options))
    q, k, v = (own(tensor, problem, place) for tensor in (problem.query, problem.key, problem.value))
    out = attend_together(q, k, v, mask)
    assert not out[:, ~rows(problem, place)].any()
    return out


def together(problem: Problem, place: ContextMesh, degrees: Parallelism) -> ContextAttention:
    """The attention of a forward over the tokens of `problem`."""
    streams = Streams(place.context)
    for name, length in problem.lengths.items():
        streams.record_length(name, length, name)
    return ContextAttention(place, degrees, streams, tuple(problem.lengths), tuple(problem.lengths))


def own(full: Tensor, problem: Problem, place: ContextMesh) -> Tensor:
    """This rank's chunk of [B, text + image, ...], as a model has it: its text, then its image, or stand-ins."""
    return torch.cat([chunk(stream, place, 1) for stream in full.split([problem.text, problem.image], dim=1)], dim=1)


def rows(problem: Problem, place: ContextMesh) -> Tensor:
    """Which rows of `own` are no stand-ins."""
    everything = torch.ones(1, problem.text + problem.image, dtype=torch.bool)
    return torch.cat(
        [
            torch.ones(size, dtype=torch.bool) if size else torch.zeros(1, dtype=torch.bool)
            for size in (chunk(s, place, 0).shape[1] for s in everything.split([problem.text, problem.image], dim=1))
        ]
    )


def _compare(got: Tensor, problem: Problem, place: ContextMesh) -> float:
    full = attention(problem)
    expected = own(full, problem, place)
    assert got.shape == expected.shape
    assert not got.isnan().any(), "NaN"
    difference = (got.double() - expected)[:, rows(problem, place)].abs()
    return float(difference.max() / full.std()) if difference.numel() else 0.0


def _error(place: ContextMesh, problem: Problem, seed: int, degrees: list[int], options: dict[str, Any]) -> float:
    mask = None if problem.mask is None else masked_as(problem, MASK_FORMS[seed % len(MASK_FORMS)], place)
    inputs = [tensor.clone() for tensor in (problem.query, problem.key, problem.value)]
    got = _compare(run(problem, degrees, mask, options, place), problem, place)
    assert all(map(torch.equal, inputs, (problem.query, problem.key, problem.value))), "inputs were changed"
    return got


def masked_as(problem: Problem, form: str, place: ContextMesh) -> Tensor:
    assert problem.mask is not None
    mask = problem.mask if form.startswith("whole") else own(problem.mask, problem, place)
    if mask.ndim == 2 and "2d" in form:
        return mask.int() if form == "2d int" else mask
    mask = mask.reshape(*mask.shape[:2], -1).permute(0, 2, 1)[:, :, None, :]
    if "bool" in form:
        return mask
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf if form == "4d -inf" else -1e4)


def chunk(full: Tensor, place: ContextMesh, at_least: int) -> Tensor:
    start, size = chunk_range(full.shape[1], place.context.parts, place.context.index)
    return full[:, start : start + size] if size else full[:, :at_least]


def _own_values(lengths: list[int], place: MeshDim) -> list[float]:
    values, offset = [], 0
    for length in lengths:
        start, size = chunk_range(length, place.parts, place.index)
        values += [float(offset + start + step) for step in range(size)]
        offset += length
    return values


def nan_filled(*args: Any, **kwargs: Any) -> Tensor:
    buffer = torch.empty(*args, **kwargs)
    return buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer.fill_(255)
