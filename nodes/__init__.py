"""The graph side: the only code that knows ComfyUI's nodes."""

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from .ahead import on_prompt
from .config import CPParallelConfig
from .demo import CPDemoConditioning, CPDemoDecode, CPDemoModel
from .loader import CPLoadDiffusionModel
from .plan import CPPlan
from .quiet import keep_tracebacks_of_refusals_out
from .routes import add_routes
from .sampler import CPSampler, CPSamplerAdvanced, CPSamplerCustom, CPSamplerCustomBasic
from .status import start_publishing
from .vae import CPVAE


class ContextParallelExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Queued prompts are heard of; the page is served."""
        PromptServer.instance.add_on_prompt_handler(on_prompt)
        add_routes()
        start_publishing()
        keep_tracebacks_of_refusals_out()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            CPSampler,
            CPSamplerAdvanced,
            CPSamplerCustom,
            CPSamplerCustomBasic,
            CPParallelConfig,
            CPPlan,
            CPLoadDiffusionModel,
            CPVAE,
            CPDemoModel,
            CPDemoConditioning,
            CPDemoDecode,
        ]
