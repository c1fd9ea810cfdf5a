"""The text encoder of a CLIP in the workers: each call of it is one request to them."""

from __future__ import annotations

import logging
from typing import Any

import comfy.model_management
import comfy.sd
from comfy.hooks import HookGroup
from comfy.model_management import module_size
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...parallel_runtime.architectures.network_modules import encoder_units
from ...parallel_runtime.errors import Refused, say
from ...parallel_runtime.explain.plan_words import text_encoder
from ...parallel_runtime.jobs import EncoderMethod, EncodingJob
from ...parallel_runtime.loading.code_names import packs_named
from ...parallel_runtime.planning.memory_model import Capacity
from ...parallel_runtime.planning.resolve import EncoderPlacement, EncoderSize, place_encoder
from ...parallel_runtime.planning.run_plan import Estimate, RunPlan
from ...parallel_runtime.request import ParallelRequest
from ...parallel_runtime.specs import ModelSpec, Parallelism, Placement
from ..describe.clip import check_encoder, describe_clip, describe_encoding, with_patches
from ..describe.model import describe_weight_patches
from ..describe.model_files import describer
from ..describe.vae import NotParallel
from .comfy_memory import LIMIT, WeightlessPatcher, free_model, room_bytes, user_limits
from .lease import Lease, lease_workers, progress_bar
from .remote_vae import placement_for

log = logging.getLogger(__name__)

GENERATE_WHILE_ENCODING = (
    "comfy.text_encoders.ace15",
    "comfy.text_encoders.minimax_music",
)  # with a layer's own weights

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
        check_encoder(patcher, of_pack=bool(packs_named(self._spec.loader)))
        spec, described = with_patches(self._spec, patcher), describe_encoding(patcher, arguments, self._options)
        of_packs = describer()
        weight_patches = describe_weight_patches(patcher, of_packs)
        if of_packs.packs:
            raise NotParallel(say("clip.patched", what=min(of_packs.packs)))
        size = self._size(method, next(iter(arguments.values())))
        with lease_workers(spec, placement_for(self._request), work="prompt") as lease:
            placed = self._place(lease, size)
            plan = _plan(lease.group.placement, placed, size)
            lack = lease.claim(plan, limited=True)
            assert lease.loaded is not None
            if lack:
                lease.loaded.free()
                raise NotParallel(lack.sentence)
            lease.loaded.encoder = placed
            job = EncodingJob(
                method=method,
                ranks=list(placed.ranks),
                stages=list(placed.stages),
                described=described,
                weight_patches=weight_patches,
            )
            result = lease.run(plan, job, on_step=progress_bar())
        devices = ", ".join(plan.placement.devices[rank] for rank in placed.ranks)
        log.info("[CP] text encoded on %s in %.2f s, loaded in %.2f s", devices, result.seconds, result.load_seconds)
        here = comfy.model_management.intermediate_device()
        return tree_map_only(Tensor, lambda tensor: tensor.to(here), result.value["returned"])

    def _place(self, lease: Lease, size: EncoderSize) -> EncoderPlacement:
        """Returns the workers that have the encoder, else those that shall have it. Raises Refused where it fits
        nowhere."""
        loaded, placement = lease.loaded, lease.group.placement
        if loaded is not None and loaded.encoder is not None:
            if size.staged or not loaded.encoder.stages:
                return loaded.encoder
            loaded.free()
        budgets = lease.budget_bytes()[: len(placement.devices)]
        limited_by = LIMIT if user_limits(placement.world_size) else ""
        placed = place_encoder(size, room_bytes(lease.group), budgets, limited_by)
        if placed.stages:
            log.info("[CP] the text encoder is in stages on workers %s", ", ".join(map(str, placed.ranks)))
        elif placed.weights.mode == "offload":
            log.info("[CP] the text encoder's blocks are in main memory and fetched as they run")
        return placed

    def _size(self, method: EncoderMethod, tokens: Any) -> EncoderSize:
        return encoder_size(self._clip.patcher, staged=method != "generate", workspace=self._workspace_bytes(tokens))

    def _workspace_bytes(self, tokens: Any) -> int:
        """Returns the bytes that ComfyUI counts for the activations of these tokens."""
        estimate, patcher = getattr(self._native, "memory_estimation_function", None), self._clip.patcher
        needed = 0 if estimate is None else int(estimate(tokens, device=patcher.load_device))
        return max(_least_workspace(patcher), needed)


def encoder_size(patcher: ModelPatcher, *, staged: bool, workspace: int) -> EncoderSize:
    """Returns the bytes of a CLIP's text encoder for a call that may be `staged`."""
    layers, blocks = ([*map(module_size, units)] for units in encoder_units(patcher.model))
    return EncoderSize(
        layers=tuple(layers),
        blocks=tuple(blocks),
        other=max(0, patcher.model_size() - sum(layers) - sum(blocks)),
        workspace=workspace,
        staged=staged and type(patcher.model).__module__ not in GENERATE_WHILE_ENCODING,
    )


def _plan(placement: Placement, placed: EncoderPlacement, size: EncoderSize) -> RunPlan:
    """Returns a plan with the bytes of the workers that have the encoder."""
    weights = dict(zip(placed.ranks, placed.weight_bytes, strict=True))
    ranks = range(placement.world_size)
    needed = Estimate(
        weight_bytes_by_rank=tuple(weights.get(rank, 0) for rank in ranks),
        activation_bytes_by_rank=tuple(size.workspace * (rank in weights) for rank in ranks),
        buffer_bytes_by_rank=tuple(placed.buffer_bytes * (rank in weights) for rank in ranks),
    )
    degrees = Parallelism(data_degree=placement.world_size)
    return RunPlan(degrees=degrees, placement=placement, weights=placed.weights, estimate=needed)


def explain_encoder(clip: Any, plan: RunPlan, capacity: Capacity) -> tuple[str, ...]:
    """Returns sentences on where the text encoder of a CLIP, with or without CP CLIP, goes beside a planned network."""
    remote = isinstance(clip.cond_stage_model, RemoteEncoder)
    try:
        if not remote:
            describe_clip(clip)
        size = encoder_size(clip.patcher, staged=True, workspace=_least_workspace(clip.patcher))
        budgets = capacity.budget_bytes(plan.placement.world_size)[: len(plan.placement.devices)]
        beside = budgets
        if plan.estimate is not None:
            each = zip(budgets, plan.estimate.weight_bytes_by_rank, strict=False)
            beside = tuple(None if budget is None else max(0, budget - weights) for budget, weights in each)
        placed = place_encoder(size, beside, budgets, capacity.limited_by)
    except (NotParallel, Refused) as reason:
        return (say("encode.comfyui", reason=reason.sentence if isinstance(reason, Refused) else reason.args[0]),)
    sentences = text_encoder(placed, size, plan.placement.devices)
    return sentences if remote else (say("encode.without"), *sentences)


def _least_workspace(patcher: ModelPatcher) -> int:
    """Returns the bytes for activations that ComfyUI always counts."""
    return 0 if patcher.load_device.type == "cpu" else int(comfy.model_management.minimum_inference_memory())
