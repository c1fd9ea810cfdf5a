"""The nodes of the pack, and what the pack registers with ComfyUI when that starts."""

import logging
import sys
import traceback

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from ..parallel_runtime.errors import Refused, WorkerLost
from ..parallel_runtime.loading.mapped import note_missing
from .classes import cp_loaders, cp_plan, cp_sampler, cp_vae_and_clip
from .describe.model_files import note_files
from .describe.model_source import note_loaders
from .remote.upcoming_prompts import note_executions
from .server.routes import add_routes, start_publishing, untested
from .server.settings import on_prompt, start_with_comfyui


class ContextParallelExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Registers the prompt handler, routes, status events, what notes where models come from, and a log filter that
        hides tracebacks of ours."""
        if newer := untested():
            logging.getLogger(__name__).warning("[CP] %s", newer)
        note_files()
        note_missing()
        note_loaders()
        note_executions()
        PromptServer.instance.add_on_prompt_handler(on_prompt)
        add_routes()
        start_publishing()
        start_with_comfyui()
        logging.getLogger().addFilter(_is_needed)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            cp_sampler.CPSampler, cp_sampler.CPSamplerAdvanced, cp_sampler.CPSamplerCustom,
            cp_sampler.CPSamplerCustomBasic, cp_sampler.CPParallelConfig, cp_plan.CPPlan, cp_plan.CPCompare,
            cp_loaders.CPLoadDiffusionModel, cp_sampler.CPModel, cp_vae_and_clip.CPVAE, cp_vae_and_clip.CPCLIP,
            cp_loaders.CPLoadCLIP, cp_loaders.CPDemoModel, cp_loaders.CPDemoConditioning, cp_loaders.CPDemoDecode,
        ]  # fmt: skip


def _is_needed(record: logging.LogRecord) -> bool:
    """False for the traceback of a Refused or a WorkerLost, which is that of this process: ComfyUI logs the sentence in
    another record, and lease.py the traceback of a worker that raised."""
    return not (isinstance(sys.exc_info()[1], Refused | WorkerLost) and record.msg == traceback.format_exc())
