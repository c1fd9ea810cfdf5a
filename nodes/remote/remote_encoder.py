"""The text encoder of a CLIP in the workers: each call of it is one request to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from comfy.hooks import HookGroup
from comfy.model_management import module_size
from comfy.model_management import throw_exception_if_processing_interrupted as check_interrupt
from comfy.model_patcher import ModelPatcher
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...parallel_runtime.architectures.network_modules import encoder_units
from ...parallel_runtime.errors import ParallelError, Refused, WorkerFailed, WorkerLost, say
from ...parallel_runtime.explain.plan_words import text_encoder
from ...parallel_runtime.group.worker_group import OnStep, Watch
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
from .lease import Lease, lease_workers, leased_if_idle, progress_bar, taken_over
from .remote_vae import placement_for
from .upcoming_prompts import Call, CanEncodeAhead, Encoding, Recorded, UpcomingPrompts, is_over, upcoming

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


class Abandoned(Exception):
    """The prompt that wanted an encoding is over."""


class RemoteEncoder(CanEncodeAhead):
    """Replaces `cond_stage_model` of `clip`, for the methods that ComfyUI's CLIP calls."""

    def __init__(
        self,
        clip: comfy.sd.CLIP,
        native: Any,
        spec: ModelSpec,
        request: ParallelRequest | None,
        *,
        records: bool = False,
    ) -> None:
        self._clip = clip
        self._native = native  # ComfyUI's own text encoder
        self._spec = spec
        self._request = request
        self._records = records  # calls, instead of computing them
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

    def recording(self, clip: comfy.sd.CLIP) -> RemoteEncoder:
        """Returns a text encoder for `clip` that raises Recorded at its first call."""
        return RemoteEncoder(clip, self._native, self._spec, self._request, records=True)

    def encode_ahead(self, calls: Callable[[], list[Call]], prompt: str) -> list[Encoding]:
        """Begins to compute these calls on another thread, if the workers are idle. Of errors nodes learn as they
        ask."""
        encodings, begun = list[Encoding](), Event()
        try:
            spec = with_patches(self._spec, self._clip.patcher)
            with leased_if_idle(spec, placement_for(self._request)) as lease:
                if lease is None or _would_load_on_own_gpu(lease):
                    return []
                encodings += map(Encoding, calls())
                if encodings:
                    prepared = self._prepare(lease, [encoding.call for encoding in encodings])
                    arguments = (lease, *prepared, encodings, prompt, begun)
                    Thread(target=self._encode_in_thread, args=arguments, name="prompts", daemon=True).start()
        except (NotParallel, ParallelError):
            return []
        if encodings:
            begun.wait()
        return encodings

    @torch.inference_mode()
    def _encode_in_thread(
        self, lease: Lease, plan: RunPlan, job: EncodingJob, encodings: list[Encoding], prompt: str, begun: Event
    ) -> None:
        def on_step(done: int, x0: Any, x: Any, total: int) -> None:
            for encoding in encodings:
                encoding.step = done, total

        def watch() -> None:
            if is_over(prompt):
                raise Abandoned("nobody asks for them any more")

        after = "keep" if self._request is None else self._request.after_sampling
        try:
            with taken_over(lease, prompt, after, begun):
                returned = self._run(lease, plan, job, on_step, watch)
            for encoding, value in zip(encodings, returned, strict=True):
                encoding.future.set_result(value)
        except (Abandoned, Refused, WorkerLost) as reason:
            log.info("[CP] prompts were not encoded ahead: %s", reason)
            full = isinstance(reason, WorkerFailed) and reason.cause.kind == "out_of_memory"  # of what ran meanwhile
            for encoding in encodings if isinstance(reason, WorkerLost) and not full else ():
                encoding.future.set_exception(reason)
        finally:
            for encoding in encodings:
                encoding.future.cancel()  # where it has no result

    def _call(self, method: EncoderMethod, arguments: dict[str, Any]) -> Any:
        call, prompts = self._described(method, arguments), upcoming()
        if self._records:
            raise Recorded(call)
        returned = prompts.take(call) if prompts is not None else None
        if returned is None:
            self._called = True
            returned = self._encode(call, prompts)
        here = comfy.model_management.intermediate_device()
        return tree_map_only(Tensor, lambda tensor: tensor.to(here), returned)

    def _described(self, method: EncoderMethod, arguments: dict[str, Any]) -> Call:
        patcher, of_packs = self._clip.patcher, describer()
        check_encoder(patcher, of_pack=bool(packs_named(self._spec.loader)))
        weight_patches = describe_weight_patches(patcher, of_packs)
        if of_packs.packs:
            raise NotParallel(say("clip.patched", what=min(of_packs.packs)))
        return Call(
            spec=with_patches(self._spec, patcher),
            request=self._request,
            method=method,
            described=describe_encoding(patcher, arguments, self._options),
            weight_patches=weight_patches,
            size=self._size(method, next(iter(arguments.values()))),
        )

    def _encode(self, call: Call, prompts: UpcomingPrompts | None) -> Any:
        """Returns the result of a call. The workers also compute others that nodes will make, which are kept; where
        they refuse, this one alone."""
        others = prompts.beside(self._clip) if prompts is not None and call.method == "encode_token_weights" else []
        try:
            first, *rest = self._encode_now([call, *others])
        except (NotParallel, Refused):
            if not others:
                raise
            return self._encode_now([call])[0]
        if prompts is not None:
            prompts.keep(others, rest)
        return first

    def _encode_now(self, calls: Sequence[Call]) -> list[Any]:
        with lease_workers(calls[0].spec, placement_for(self._request), work="prompt") as lease:
            return self._run(lease, *self._prepare(lease, calls), progress_bar())

    def _prepare(self, lease: Lease, calls: Sequence[Call]) -> tuple[RunPlan, EncodingJob]:
        """Places the encoder, claims memory for it, and makes one job of these calls of one CLIP. Raises NotParallel,
        Refused."""
        size = max((call.size for call in calls), key=lambda size: size.workspace)
        placed = self._place(lease, size, len(calls))
        plan = _plan(lease.group.placement, placed, size)
        lack = lease.claim(plan, limited=True)
        assert lease.loaded is not None
        if lack:
            lease.loaded.free()
            raise NotParallel(lack.sentence)
        lease.loaded.encoder = placed
        return plan, EncodingJob(
            method=calls[0].method,
            ranks=list(placed.ranks),
            stages=list(placed.stages),
            calls=[call.described for call in calls],
            weight_patches=calls[0].weight_patches,
        )

    def _run(
        self, lease: Lease, plan: RunPlan, job: EncodingJob, on_step: OnStep, watch: Watch = check_interrupt
    ) -> list[Any]:
        result = lease.run(plan, job, on_step=on_step, watch=watch)
        ranks = job.ranks if job.stages else job.ranks[: len(job.calls)]
        devices = ", ".join(plan.placement.devices[rank] for rank in ranks)
        many = f" ({len(job.calls)} prompts)" if len(job.calls) > 1 else ""
        log.info(
            "[CP] text encoded on %s in %.2f s, loaded in %.2f s%s", devices, result.seconds, result.load_seconds, many
        )
        return [result.value[str(number)] for number in range(len(job.calls))]

    def _place(self, lease: Lease, size: EncoderSize, prompts: int) -> EncoderPlacement:
        """Returns the workers that have the encoder, else those that shall have it: others than now only where more, or
        fewer, have room for one each of several prompts. Raises Refused where it fits nowhere."""
        loaded, group = lease.loaded, lease.group
        have = None if loaded is None else loaded.encoder
        if loaded is not None and have is not None and have.stages and not size.staged:
            loaded.free()
            have = None
        copies = prompts if have is None else max(prompts, len(have.ranks))
        if have is not None and (have.stages or have.weights.mode != "replicate" or copies == 1):
            return have
        budgets = lease.budget_bytes()[: len(group.placement.devices)]
        limited_by = LIMIT if user_limits(group.placement.world_size) else ""
        placed = place_encoder(size, room_bytes(group, self._spec), budgets, limited_by, prompts=copies)
        if loaded is not None and have is not None:
            whole = placed.beside and not placed.stages and placed.weights.mode == "replicate"
            if len(have.ranks) == (len(placed.ranks) if whole else 1):
                return have
            loaded.free()
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


def _would_load_on_own_gpu(lease: Lease) -> bool:
    """Would a worker load the encoder on ComfyUI's own GPU? The memory would look free to nodes that run meanwhile."""
    own = comfy.model_management.get_torch_device()
    return own.type != "cpu" and lease.loaded is None and str(own) in lease.group.placement.devices


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
