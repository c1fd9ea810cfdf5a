"""The graph side: the only code that knows ComfyUI's nodes; and what it hooks into ComfyUI when that starts."""

import logging

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from ..parallel_runtime.errors import Refused
from .ahead import on_prompt
from .config import CPParallelConfig
from .demo import CPDemoConditioning, CPDemoDecode, CPDemoModel
from .loader import CPLoadDiffusionModel
from .plan import CPPlan
from .routes import add_routes
from .sampler import CPSampler, CPSamplerAdvanced, CPSamplerCustom, CPSamplerCustomBasic
from .status import start_publishing
from .vae import CPVAE

START, RAISED = "Traceback (most recent call last)", f"{Refused.__module__}.{Refused.__qualname__}: "


class ContextParallelExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Queued prompts are heard of; the page is served; of a refusal the log has the sentence alone."""
        PromptServer.instance.add_on_prompt_handler(on_prompt)
        add_routes()
        start_publishing()
        logging.getLogger().addFilter(_is_news)

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


def _is_news(record: logging.LogRecord) -> bool:
    """ComfyUI logs what a node raised in two records: the sentence, and the traceback. Not news is that of a refusal,
    which is no crash."""
    text = record.msg if isinstance(record.msg, str) else ""
    return not (text.startswith(START) and any(line.startswith(RAISED) for line in text.splitlines()))
