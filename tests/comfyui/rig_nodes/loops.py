"""A loop in the graph, with the habits of ComfyUI's Start Loop and End Loop (after v0.33): copies of the nodes in it
run one after the other, each under a name of its own, and are shown as the nodes that they are copies of.
"""

from __future__ import annotations

from comfy_api.latest import io
from comfy_execution.graph_utils import GraphBuilder


class Loop(io.ComfyNode):
    """Runs the node `body` so many `times`, the latent of each time from the one before."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestLoop",
            category="cp test",
            is_dev_only=True,
            inputs=[io.String.Input("body"), io.Int.Input("times", min=1, max=9)],
            outputs=[io.Latent.Output()],
            hidden=[io.Hidden.dynprompt],
            enable_expand=True,
        )

    @classmethod
    def execute(cls, body: str, times: int) -> io.NodeOutput:
        node, graph = cls.hidden.dynprompt.get_node(body), GraphBuilder()
        carried = node["inputs"]["latent_image"]
        for position in range(times):
            copy = graph.node(node["class_type"], f"{position}_{body}", **node["inputs"] | {"latent_image": carried})
            copy.set_override_display_id(body)
            carried = copy.out(0)
        return io.NodeOutput(carried, expand=graph.finalize())

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        return float("nan")  # what it runs is no input of its own
