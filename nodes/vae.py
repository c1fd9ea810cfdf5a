"""CP VAE: a VAE in, the same VAE over the workers out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..parallel_runtime.specs import ParallelRequest
from .config import CATEGORY, CPConfig, requested
from .divided_vae import divided
from .remote_vae import placement_for


class CPVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPVAE",
            display_name="CP VAE",
            category=CATEGORY,
            description="A VAE that decodes and encodes on several GPUs, each with a share of the rows and of "
            "the memory, and with the same result. For every node that takes a VAE.",
            search_aliases=["vae decode", "vae encode", "multi gpu", "parallel vae", "tiled vae", "context parallel"],
            inputs=[
                io.Vae.Input("vae", tooltip="From Load VAE or Load Checkpoint."),
                CPConfig.Input(
                    "cp_config",
                    optional=True,
                    tooltip="Which workers. Unconnected: the ones that a CP sampler has started, else every GPU.",
                ),
            ],
            outputs=[io.Vae.Output(tooltip="For every node that takes a VAE.")],
        )

    @classmethod
    def execute(cls, vae: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        request = None if cp_config is None else requested(cp_config)
        placement_for(request)  # refused here, not in the middle of a graph
        return io.NodeOutput(divided(vae, request))
