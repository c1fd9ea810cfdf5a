"""CP Parallel Config: its widgets are the table of parallel_runtime/request.py; nothing starts here."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...parallel_runtime.request import ParallelRequest, Widget, widgets
from ..describe.host import announce_refusals

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
            description="How CP Sampler divides one image or video over GPUs. Optional: without it the default devices "
            "are used.",
            search_aliases=["multi gpu", "ring attention", "ulysses", "context parallel", "sequence parallel"],
            inputs=[_input(widget) for widget in widgets()],
            outputs=[CPConfig.Output(display_name="cp_config", tooltip="For the CP nodes.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(ParallelRequest.of(values))


def _input(widget: Widget) -> io.Input:
    display = {"optional": not widget.required, "advanced": widget.advanced or None}
    options = {"default": widget.default, "tooltip": widget.tooltip, **display, **widget.limits}
    if widget.options:
        return io.Combo.Input(widget.name, options=list(widget.options), **options)
    return INPUTS[widget.kind].Input(widget.name, **options)
