"""The graph side: the only code that knows ComfyUI's nodes."""

from comfy_api.latest import ComfyExtension, io

from .config import CPParallelConfig
from .demo import CPDemoConditioning, CPDemoDecode
from .sampler import CPSampler, CPSamplerAdvanced, CPSamplerCustom


class ContextParallelExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            CPSampler,
            CPSamplerAdvanced,
            CPSamplerCustom,
            CPParallelConfig,
            CPDemoConditioning,
            CPDemoDecode,
        ]
