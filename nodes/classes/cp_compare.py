"""CP Compare: one step of each sampler natively and on the workers, for scripts; on the page CP Plan does it."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...parallel_runtime.explain.plan_report import Report
from ..describe.host import announce_refusals
from ..remote.comparing import compared_rows, expanded
from .cp_config import CATEGORY


class CPCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPCompare",
            display_name="CP Compare",
            category=CATEGORY,
            description="Takes one step of each sampler of this graph that uses workers, on them and in ComfyUI's "
            "process, and says how far apart they are. CP Plan's button Compare does the same.",
            is_dev_only=True,
            outputs=[io.String.Output(display_name="report", tooltip="What is apart, a line a sampler.")],
            is_output_node=True,
            enable_expand=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """A NaN of its own, which no cached result matches."""
        return float("nan")

    @classmethod
    @announce_refusals()
    def execute(cls, compare: bool = True, **compared: Any) -> io.NodeOutput:
        if not compared:
            return expanded()
        report = Report(rows=tuple(compared_rows(compared)))
        return io.NodeOutput(report.text, ui={"text": (report.text,), "cp_compare": [report.table]})
