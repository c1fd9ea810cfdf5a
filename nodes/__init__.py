"""The graph side: the only code that knows ComfyUI's nodes."""

import folder_paths
from comfy_api.latest import ComfyExtension, io

from ..parallel_runtime.demo import MODEL
from .config import CPParallelConfig
from .demo import CPDemoConditioning, CPDemoDecode
from .loader import CPLoadDiffusionModel
from .plan import CPPlan
from .sampler import CPSampler, CPSamplerAdvanced, CPSamplerCustom


class ContextParallelExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Load Diffusion Model lists the embedded demo model too."""
        folder_paths.add_model_folder_path("diffusion_models", str(MODEL.parent))

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            CPSampler,
            CPSamplerAdvanced,
            CPSamplerCustom,
            CPParallelConfig,
            CPPlan,
            CPLoadDiffusionModel,
            CPDemoConditioning,
            CPDemoDecode,
        ]
