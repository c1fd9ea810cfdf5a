"""ComfyUI's text encoders: each is loaded by ComfyUI's own loader, whole on one rank, which runs it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.utils
import torch
from torch import nn

from ...engine.comm.device_events import outermost_blocks
from ...engine.comm.mesh import MeshDim
from ...engine.comm.ranks import rank
from ...errors import Refused
from ...jobs import EncodingJob, Job
from ...loading.code_names import named, qualified_name
from ...loading.fingerprint import structure_fingerprint
from ...loading.mapped import load_mapped
from ...loading.object_codec import rebuild
from ...specs import ModelSpec
from ..models import Model
from ..process.progress import Progress
from .comfy_model import ComfyModel, arguments_of
from .patcher import DynamicVram, RankPatcher, WeightState

CPU = torch.device("cpu")
BAD_INPUT = (AttributeError, LookupError, TypeError, ValueError)  # raised for tokens of another text encoder


def load(spec: ModelSpec, device: torch.device, on_progress: Callable[[float], None], job: Job) -> Model:
    """Loads the text encoder, or an empty model on a rank that does not run it. Raises Refused where this rank's
    ComfyUI makes another one of its files."""
    assert isinstance(job, EncodingJob)
    if job.rank != rank():
        return Model(spec, nn.Identity(), device=device)
    on_progress(0.0)
    patcher: Any = load_mapped(RankPatcher, named(spec.loader), arguments_of(spec), None)
    encoder = patcher.model
    if structure_fingerprint(encoder) != spec.weights_fingerprint:
        raise Refused("clip.changed", kind=qualified_name(type(encoder)))
    patcher.load_device, patcher.offload_device = device, CPU
    patcher.weight_state = WeightState(dynamic_vram=DynamicVram(encoder) if spec.dynamic_vram else None)
    return ComfyModel(spec, encoder, patcher=patcher, device=device)


def run(model: Model, job: EncodingJob, progress: Progress) -> dict[str, Any]:
    """Returns {"returned": what the method returned}, and nothing on other ranks."""
    if not isinstance(model, ComfyModel):
        return {}
    described = rebuild(job.described)
    patcher, encoder = model.clone(job.weight_patches, progress.loading), model.patcher.model
    patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    with _keeping_other_models():
        comfy.model_management.load_models_gpu([patcher])
    with _hooked(patcher, described["hook_patches"]), _reporting(progress, encoder):
        encoder.reset_clip_options()
        for options in (*described["options"], {"execution_device": model.device}):
            encoder.set_clip_options(options)
        try:
            return {"returned": getattr(encoder, job.method)(**described["arguments"])}
        except BAD_INPUT as error:  # no other rank waits for this one
            if isinstance(error, Refused):
                raise
            raise Refused("clip.failed", error=repr(error)) from None


@contextmanager
def _keeping_other_models() -> Iterator[None]:
    """Has ComfyUI unload no other model in this context: the host has made room, and ranks that share out a network's
    weights must all have it loaded."""
    free_memory = comfy.model_management.free_memory
    comfy.model_management.free_memory = lambda *_, **__: []
    try:
        yield
    finally:
        comfy.model_management.free_memory = free_memory


@contextmanager
def _hooked(patcher: RankPatcher, patches: dict[str, list[Any]]) -> Iterator[None]:
    """Merges the weight patches of hooks into the loaded weights, in this context, as ComfyUI does."""
    hook, group = comfy.hooks.WeightHook(), comfy.hooks.HookGroup()
    group.add(hook)
    patcher.hook_patches = {hook.hook_ref: patches}
    patcher.patch_hooks(group if patches else None)
    try:
        yield
    finally:
        patcher.patch_hooks(None)


@contextmanager
def _reporting(progress: Progress, encoder: nn.Module) -> Iterator[None]:
    """Reports what ComfyUI's own progress bars show, and cancels before a block, in this context."""
    before = comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(lambda done, total, *_, **__: progress.report_done(done, total))
    with ExitStack() as hooks:
        for block in outermost_blocks(encoder):
            hooks.enter_context(block.register_forward_pre_hook(lambda *_: progress.vote(MeshDim())))
        try:
            yield
        finally:
            comfy.utils.set_progress_bar_global_hook(before)
