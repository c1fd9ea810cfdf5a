"""Text encoders: each is loaded by ComfyUI's own loader or a pack's node, whole on ranks that encode prompts in turn,
each by itself, or in stages on several."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.utils
import torch
from torch import nn

from ...architectures.network_modules import encoder_units, outermost_blocks
from ...engine.comm.mesh import MeshDim
from ...engine.comm.ranks import rank
from ...engine.prefetch import RankPlacement
from ...engine.stages import OwnedModules
from ...engine.weight_sources import HostWeights
from ...errors import BAD_INPUT, Refused
from ...jobs import EncodingJob, Job
from ...loading.mapped import with_attributes
from ...loading.object_codec import rebuild
from ...specs import EncoderMethod, ModelSpec
from ..models import Model
from ..progress import Progress
from .comfy_model import ComfyModel, import_loader, load_patcher
from .patcher import DynamicVram, OffloadSet, RankPatcher, WeightState

CPU = torch.device("cpu")


class Absent(Model):
    """A text encoder on a rank that has nothing of it."""

    def place_weights(self, placement: RankPlacement | None) -> None:
        pass


@dataclass(eq=False, kw_only=True)
class Encoder(ComfyModel):
    """A text encoder on the `ranks` that have it: in stages each has some of its parts in `owned`."""

    ranks: list[int]
    owned: OwnedModules
    placement: RankPlacement | None = None
    own_compute_dtype = common_compute_dtype = None  # the host names the dtype of computation

    @property
    def dim(self) -> MeshDim:
        """The ranks that encode a prompt together: this one alone where it has all parts."""
        ranks = self.ranks if self.owned.paths else [rank()]
        return replace(self.mesh.data, size=len(ranks), index=ranks.index(rank()), ranks=tuple(ranks), shares=())

    @property
    def remote_paths(self) -> list[str]:
        return self.owned.paths

    def place_weights(self, placement: RankPlacement | None) -> None:
        """Keeps blocks in main memory, of this rank alone; None keeps all weights on the device."""
        if placement is self.placement:
            return
        self.offload()
        self.placement, offload_set = placement, None
        if placement is not None:
            staged = self.device.type != "cpu"
            own = replace(placement, source=lambda: HostWeights(self.device, [0], 0, staged=staged, dim=MeshDim()))
            offload_set = OffloadSet.of(self.network, encoder_units(self.network)[1], own)
        self.patcher.weight_state.offload_set = offload_set


def load(spec: ModelSpec, device: torch.device, on_progress: Callable[[float], None], job: Job) -> Model:
    """Loads the text encoder, or its parts that this rank has, or nothing. Raises Refused where its files give another
    than ComfyUI's process has."""
    assert isinstance(job, EncodingJob)
    import_loader(spec)
    if rank() not in job.ranks:
        return Absent(spec, nn.Identity(), device=device)
    on_progress(0.0)
    patcher: Any = load_patcher(spec)
    if patcher is None:
        raise Refused("clip.edited", title=spec.title)
    encoder = patcher.model
    patcher.load_device, patcher.offload_device = device, CPU
    patcher.weight_state = WeightState(dynamic_vram=DynamicVram(encoder) if spec.dynamic_vram else None)
    layers, blocks = encoder_units(encoder)
    owners = [stage for stage, units in enumerate(job.stages) for _ in range(units)]
    owned = OwnedModules(encoder, [*layers, *blocks] if owners else [], owners, job.ranks.index(rank()))
    patcher.size = 0  # ComfyUI counts the parts of this rank
    return Encoder(spec, encoder, patcher=patcher, device=device, ranks=job.ranks, owned=owned)


def run(model: Model, job: EncodingJob, progress: Progress) -> dict[str, Any]:
    """Returns what the method returned for each call of this rank, by the call's number."""
    if not isinstance(model, Encoder):
        return {}
    turn = slice(None) if job.stages else slice(job.ranks.index(rank()), None, len(job.ranks))
    calls = [*enumerate(map(rebuild, job.calls))][turn]
    patcher, encoder = model.clone(job.weight_patches, progress.loading), model.patcher.model
    if not calls:
        return {}
    dim = model.owned.dim = model.dim
    patcher.hook_mode = comfy.hooks.EnumHookMode.MinVram
    # ComfyUI is to unload no other model: the host has made room, and ranks that share out a network's weights must all
    # have it loaded.
    with with_attributes(comfy.model_management, free_memory=lambda *_, **__: []):
        comfy.model_management.load_models_gpu([patcher])
    with ExitStack() as stack:
        stack.callback(comfy.utils.set_progress_bar_global_hook, comfy.utils.PROGRESS_BAR_HOOK)
        if rank() == job.ranks[0]:  # what ComfyUI's own progress bars show
            comfy.utils.set_progress_bar_global_hook(lambda done, total, *_, **__: progress.report_done(done, total))
        for block in outermost_blocks(encoder):  # a cancel is before a block
            stack.enter_context(block.register_forward_pre_hook(lambda *_: progress.vote(dim)))
        return {str(number): _returned(model, patcher, job.method, call) for number, call in calls}


def _returned(model: Encoder, patcher: RankPatcher, method: EncoderMethod, call: dict[str, Any]) -> Any:
    encoder = patcher.model
    if (prefetcher := patcher.weight_state.prefetcher) is not None and prefetcher.offloaded:
        prefetcher.begin()
    # The weight patches of hooks are merged into the loaded weights for this call, as ComfyUI does.
    hook, group, patches = comfy.hooks.WeightHook(), comfy.hooks.HookGroup(), model.local_patches(call["hook_patches"])
    group.add(hook)
    patcher.hook_patches = {hook.hook_ref: patches}
    patcher.patch_hooks(group if patches else None)
    try:
        encoder.reset_clip_options()
        for options in (*call["options"], {"execution_device": model.device}):
            encoder.set_clip_options(options)
        try:
            return getattr(encoder, method)(**call["arguments"])
        except BAD_INPUT as error:  # on all of its ranks
            if isinstance(error, Refused):
                raise
            raise Refused("clip.failed", error=repr(error)) from None
    finally:
        patcher.patch_hooks(None)
