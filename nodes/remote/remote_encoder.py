"""The text encoder of a CLIP in the workers: each call of it is one request to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import comfy.model_management
import comfy.sd
from comfy.hooks import HookGroup
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...parallel_runtime.errors import say
from ...parallel_runtime.jobs import EncoderMethod, EncodingJob
from ...parallel_runtime.planning.encoder_rank import encoder_rank
from ...parallel_runtime.planning.run_plan import Estimate, RunPlan
from ...parallel_runtime.request import ParallelRequest
from ...parallel_runtime.specs import ModelSpec, Parallelism
from ..describe.clip import check_encoder, describe_encoding, with_patches
from ..describe.describer import describer
from ..describe.model import describe_weight_patches
from ..describe.vae import NotParallel
from .comfy_memory import LIMIT, WeightlessPatcher, free_model, room_bytes, user_limits
from .lease import Lease, lease_workers, progress_bar
from .remote_vae import placement_for

log = logging.getLogger(__name__)

# What nodes put onto a CLIP's ModelPatcher, and where it is loaded.
STATE = (
    "additional_models", "attachments", "cached_patcher_init", "callbacks", "force_cast_weights", "forced_hooks",
    "hook_mode", "hook_patches", "hook_patches_backup", "injections", "is_clip", "load_device", "model_options",
    "object_patches", "offload_device", "patches", "patches_uuid", "weight_wrapper_patches", "wrappers",
)  # fmt: skip


def copy_state(source: ModelPatcher, target: ModelPatcher) -> None:
    """Gives `target` copies of the patches, hooks and options of `source`."""
    state = vars(source.clone())
    vars(target).update({name: state[name] for name in STATE if name in state})


class EncoderPatcher(WeightlessPatcher):
    """The ModelPatcher of a CLIP whose weights are in the workers: it keeps patches and hooks, and merges none."""

    @classmethod
    def of(cls, patcher: ModelPatcher) -> EncoderPatcher:
        made = cls(patcher.model, patcher.load_device, patcher.offload_device, size=patcher.model_size())
        copy_state(patcher, made)
        return made

    def partially_load(self, device_to: Any, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        return 0

    def patch_hooks(self, hooks: HookGroup | None) -> None:
        self.current_hooks = hooks

    def deepclone_multigpu(self, new_load_device: Any = None, models_cache: Any = None) -> EncoderPatcher:
        """Returns a clone: another device here changes nothing for the workers."""
        made: EncoderPatcher = self.clone()
        made.load_device = new_load_device or made.load_device
        return made


class RemoteEncoder:
    """Replaces `cond_stage_model` of `clip`, for the methods that ComfyUI's CLIP calls."""

    def __init__(self, clip: comfy.sd.CLIP, native: Any, spec: ModelSpec, request: ParallelRequest | None) -> None:
        self._clip = clip
        self._native = native  # ComfyUI's own text encoder
        self._spec = spec
        self._request = request
        self._options: list[dict[str, Any]] = []  # since the last reset
        self._called = False  # since the last `end`

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the native encoder, except for copying and pickling, and none before `__init__`."""
        if name.startswith("__") or "_native" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)
        return getattr(self._native, name)

    def reset_clip_options(self) -> None:
        self._options = []

    def set_clip_options(self, options: dict[str, Any]) -> None:
        self._options.append({name: value for name, value in options.items() if name != "execution_device"})

    def encode_token_weights(self, token_weight_pairs: Any) -> Any:
        return self._call("encode_token_weights", {"token_weight_pairs": token_weight_pairs})

    def generate(self, tokens: Any, **settings: Any) -> Any:
        if not any(hasattr(getattr(one, "transformer", None), "generate") for one in self._native.modules()):
            raise NotParallel(say("clip.mute", kind=type(self._native).__name__))
        return self._call("generate", {"tokens": tokens, **settings})

    def end(self) -> None:
        """Keeps, offloads or unloads the encoder after calls of it, as the user chose."""
        if self._called:
            free_model(self._spec, self._request)
        self._called = False

    def _call(self, method: EncoderMethod, arguments: dict[str, Any]) -> Any:
        self._called, patcher = True, self._clip.patcher
        check_encoder(patcher)
        spec, described = with_patches(self._spec, patcher), describe_encoding(patcher, arguments, self._options)
        weight_patches = describe_weight_patches(patcher, describer(packs=False))
        with lease_workers(spec, placement_for(self._request)) as lease:
            rank, plan = self._plan(lease, next(iter(arguments.values())))
            if lack := lease.claim(plan, limited=True):
                if lease.loaded is not None:
                    lease.loaded.free()
                raise NotParallel(lack.sentence)
            job = EncodingJob(method=method, rank=rank, described=described, weight_patches=weight_patches)
            result = lease.run(plan, job, on_step=progress_bar())
        device = plan.placement.devices[rank]
        log.info("[CP] text encoded on %s in %.2f s, loaded in %.2f s", device, result.seconds, result.load_seconds)
        here = comfy.model_management.intermediate_device()
        return tree_map_only(Tensor, lambda tensor: tensor.to(here), result.value["returned"])

    def _plan(self, lease: Lease, tokens: Any) -> tuple[int, RunPlan]:
        """Returns the rank that encodes: the one that has the encoder, else the one with the most room; and a plan with
        its bytes. Raises Refused where it fits nowhere."""
        placement, loaded = lease.group.placement, lease.loaded
        weight_bytes, workspace = self._clip.patcher.model_size(), self._workspace_bytes(tokens)
        if loaded is not None:
            rank = max(range(len(placement.devices)), key=loaded.needed.weight_bytes_by_rank.__getitem__)
        else:
            budgets = lease.budget_bytes()[: len(placement.devices)]
            limited_by = LIMIT if user_limits(placement.world_size) else ""
            rank = encoder_rank(weight_bytes + workspace, room_bytes(lease.group), budgets, limited_by)

        def on_rank(size: int) -> Sequence[int]:
            return tuple(size * (each == rank) for each in range(placement.world_size))

        needed = Estimate(
            weight_bytes_by_rank=tuple(on_rank(weight_bytes)),
            activation_bytes_by_rank=tuple(on_rank(workspace)),
            buffer_bytes_by_rank=tuple(on_rank(0)),
        )
        degrees = Parallelism(data_degree=placement.world_size)
        return rank, RunPlan(degrees=degrees, placement=placement, estimate=needed)

    def _workspace_bytes(self, tokens: Any) -> int:
        """Returns the bytes that ComfyUI counts for the activations of these tokens."""
        estimate, device = getattr(self._native, "memory_estimation_function", None), self._clip.patcher.load_device
        least = 0 if device.type == "cpu" else comfy.model_management.minimum_inference_memory()
        return int(max(least, 0 if estimate is None else estimate(tokens, device=device)))
