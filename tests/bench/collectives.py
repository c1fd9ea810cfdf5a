"""What one attention layer sends and holds: collectives, bytes and peak extra memory of ring, allgather and Ulysses.

    python -m tests.bench.collectives [--workers 4] [--tokens 4096] [--heads 8] [--batch 1] [--json out.json]

Bytes are those that rank 0 sends; memory is what is live at once inside the call beyond its inputs, output included,
in units of the rank's own queries.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.split.streams import Streams
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import Parallelism

from . import harness

COLUMNS = {"mode": "{mode}", "all-to-alls": "{all_to_alls}", "batches of messages": "{batches}",
           "messages": "{messages}", "sent": "{sent_in_queries:.2f}", "peak": "{peak_extra_in_queries:.2f}",
}  # fmt: skip


@dataclass
class Traffic:
    """What this rank started."""

    all_to_alls: int = 0
    batches: int = 0
    messages: int = 0
    bytes_sent: int = 0


def main() -> None:
    options = harness.options(__doc__, workers=4, tokens=4096, heads=8, head_dim=64, batch=1, dtype="float32")
    if harness.is_rank():
        degrees = _degrees(harness.join())
        harness.answer(_measure(name, parallelism, options) for name, parallelism in degrees.items())
    else:
        harness.report(harness.launch("collectives", workers=options.workers), COLUMNS, options.json)


def _degrees(world: int) -> dict[str, Parallelism]:
    degrees = {
        "ulysses": Parallelism(ulysses_degree=world),
        "ring": Parallelism(ring_degree=world),
        "allgather": Parallelism(ring_degree=world, options=EngineOptions(rotate_method="allgather")),
    }
    if world % 2 == 0 and world > 2:
        degrees[f"ring {world // 2} x ulysses 2"] = Parallelism(ring_degree=world // 2, ulysses_degree=2)
    return degrees


@torch.no_grad()
def _measure(name: str, parallelism: Parallelism, options: argparse.Namespace) -> dict[str, Any]:
    mesh = build_mesh(parallelism)
    streams = Streams(mesh.context)
    streams.record_length("image", options.tokens, "bench")
    attend = ContextAttention(mesh, parallelism, streams, ("image",), ("image",))
    own = streams.local_tokens(("image",)).size
    shape = (options.batch, own, options.heads, options.head_dim)
    query, key, value = (torch.randn(shape).to(getattr(torch, options.dtype)) for _ in range(3))
    attend(query, key, value)
    with _counted() as traffic:
        attend(query, key, value)
    streams.clear()  # what layers keep for each other counts too
    streams.record_length("image", options.tokens, "bench")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        attend(query, key, value)
    return {
        "mode": name,
        **vars(traffic),
        "sent_in_queries": traffic.bytes_sent / _bytes(query),
        "peak_extra_in_queries": _peak(profiled) / _bytes(query),
    }


@contextmanager
def _counted() -> Iterator[Traffic]:
    traffic = Traffic()
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_all_to_all(output: Tensor, given: Tensor, counts_in: Any, counts_out: Any, **options: Any) -> Any:
        group = options["group"]
        counts = counts_out or [given.numel() // dist.get_world_size(group)] * dist.get_world_size(group)
        traffic.all_to_alls += 1
        traffic.bytes_sent += (sum(counts) - counts[dist.get_rank(group)]) * given.element_size()
        return all_to_all(output, given, counts_in, counts_out, **options)

    def counted_batch(operations: list[dist.P2POp]) -> Any:
        sent = [operation.tensor for operation in operations if operation.op is dist.isend]
        traffic.batches += 1
        traffic.messages += len(sent)
        traffic.bytes_sent += sum(_bytes(tensor) for tensor in sent)
        return batch(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counted_all_to_all, counted_batch  # type: ignore[assignment]
    try:
        yield traffic
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch


def _peak(profiled: Any) -> int:
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main()
