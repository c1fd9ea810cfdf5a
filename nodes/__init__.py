"""The nodes of the pack, and what the pack registers with ComfyUI when that starts."""

import logging
import sys
import threading
import traceback

from comfy_api.latest import ComfyExtension, io
from server import PromptServer

from ..parallel_runtime.errors import Refused, WorkerLost
from ..parallel_runtime.group.runtime import runtime
from ..parallel_runtime.loading.mapped import note_missing
from . import routes
from .classes import cp_loaders, cp_plan, cp_sampler
from .describe import host, model_files, model_source
from .remote.upcoming_prompts import note_executions


class ContextParallelExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Registers the prompt handler, routes, status events, what notes where models come from, and a log filter that
        hides tracebacks of ours."""
        if newer := host.untested():
            logging.getLogger(__name__).warning("[CP] %s", newer)
        model_files.note_files()
        note_missing()
        model_source.note_loaders()
        note_executions()
        PromptServer.instance.add_on_prompt_handler(host.on_prompt)
        routes.add_routes()
        for package in host.PACKAGES:
            logging.getLogger(package).addHandler(runtime.journal)
        threading.Thread(target=routes.publish, name="cp status", daemon=True).start()
        host.start_with_comfyui()
        logging.getLogger().addFilter(_is_needed)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            cp_sampler.CPSampler, cp_sampler.CPSamplerAdvanced, cp_sampler.CPSamplerCustom,
            cp_sampler.CPSamplerCustomBasic, cp_sampler.CPParallelConfig, cp_plan.CPPlan, cp_plan.CPCompare,
            cp_loaders.CPLoadDiffusionModel, cp_sampler.CPModel, cp_loaders.CPVAE, cp_loaders.CPCLIP,
            cp_loaders.CPLoadCLIP, cp_loaders.CPDemoModel, cp_loaders.CPDemoConditioning, cp_loaders.CPDemoDecode,
        ]  # fmt: skip


def _is_needed(record: logging.LogRecord) -> bool:
    """False for the traceback of a Refused or a WorkerLost, which is that of this process: ComfyUI logs the sentence in
    another record, and lease.py the traceback of a worker that raised."""
    return not (isinstance(sys.exc_info()[1], Refused | WorkerLost) and record.msg == traceback.format_exc())
