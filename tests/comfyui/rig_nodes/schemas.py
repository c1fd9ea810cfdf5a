"""The schema of a node that only tests put into a graph."""

from __future__ import annotations

from collections.abc import Sequence

from comfy_api.latest import io

CATEGORY = "cp test"


def schema(node_id: str, inputs: Sequence[io.Input], *outputs: io.Output) -> io.Schema:
    return io.Schema(node_id=node_id, category=CATEGORY, is_dev_only=True, inputs=[*inputs], outputs=[*outputs])
