"""CP Parallel Config: its widgets are the rows of parallel_runtime/request.py; nothing starts here."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...parallel_runtime.request import ParallelRequest, Widget, widgets
from ..describe.refused_event import announce_refusals

CATEGORY = "model/sampling/context parallel"
CPConfig = io.Custom("CP_CONFIG")
INPUTS = {bool: io.Boolean, int: io.Int, float: io.Float, str: io.String}


class CPParallelConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPParallelConfig",
            display_name="CP Parallel Config",
            category=CATEGORY,
            description="How CP Sampler divides one image or video over GPUs. Optional: without it every GPU is used.",
            search_aliases=["multi gpu", "ring attention", "ulysses", "context parallel", "sequence parallel"],
            inputs=[_input(row) for row in widgets()],
            outputs=[CPConfig.Output(display_name="cp_config", tooltip="For the CP nodes.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(ParallelRequest.of(values))


def _input(row: Widget) -> io.Input:
    display = {"optional": not row.required, "advanced": row.advanced or None}
    options = {"default": row.default, "tooltip": row.tooltip, **display, **row.limits}
    if row.options:
        return io.Combo.Input(row.name, options=list(row.options), **options)
    return INPUTS[row.kind].Input(row.name, **options)
