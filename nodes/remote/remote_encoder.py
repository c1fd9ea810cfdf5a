"""CP CLIP's CLIP, whose text encoder is in the workers: each call of it is one request to them."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread
from typing import Any, Self

import comfy.sd
import torch
from comfy import model_management
from comfy.hooks import HookGroup
from comfy.model_management import throw_exception_if_processing_interrupted as check_interrupt
from comfy.model_patcher import ModelPatcher
from comfy_execution.progress import get_progress_state
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...parallel_runtime.architectures.network_modules import encoder_units
from ...parallel_runtime.errors import ParallelError, Refused, WorkerFailed, WorkerLost, say
from ...parallel_runtime.explain.plan_words import text_encoder
from ...parallel_runtime.group.worker_group import OnStep, Watch
from ...parallel_runtime.jobs import EncoderMethod, EncodingJob
from ...parallel_runtime.loading import code_names, mapped
from ...parallel_runtime.planning.memory_model import Capacity
from ...parallel_runtime.planning.resolve import EncoderPlacement, EncoderSize, place_encoder
from ...parallel_runtime.planning.run_plan import Estimate, RunPlan
from ...parallel_runtime.request import ParallelRequest
from ...parallel_runtime.specs import ModelSpec, Parallelism
from ..describe import model, model_source
from ..describe.model_files import NotParallel, describer
from . import comfy_memory, remote_vae
from .lease import Lease, lease_workers, leased_if_idle, progress_bar, taken_over
from .upcoming_prompts import NAME, Call, Encoding, Recorded, is_over

log = logging.getLogger(__name__)

# Modules of encoders that generate as they encode, with a layer's own weights.
GENERATE_WHILE_ENCODING = ("comfy.text_encoders.ace15", "comfy.text_encoders.minimax_music")

OPTIONS = ("apply_hooks_to_conds", "layer_idx", "tokenizer", "tokenizer_options", "use_clip_schedule")  # of a CLIP
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


class EncoderPatcher(comfy_memory.WeightlessPatcher):
    """The ModelPatcher of a CLIP whose weights are in the workers: it keeps patches and hooks, and merges none."""

    def partially_load(self, device_to: Any, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        return 0

    def patch_hooks(self, hooks: HookGroup | None) -> None:
        self.current_hooks = hooks

    def deepclone_multigpu(self, new_load_device: Any = None, models_cache: Any = None) -> Self:
        """Returns a clone: another device here changes nothing for the workers."""
        made: Self = self.clone()
        made.load_device = new_load_device or made.load_device
        return made


def parallel_clip(clip: comfy.sd.CLIP, request: ParallelRequest | None) -> comfy.sd.CLIP:
    """Returns `clip` with its text encoder in the workers, or `clip` itself, with a warning in the log, where workers
    cannot have it."""
    native = clip.to_native() if isinstance(clip, ParallelCLIP) else clip
    try:
        return ParallelCLIP(native, native, model_source.describe_clip(native), request)
    except (NotParallel, Refused) as reason:
        remote_vae.warn(ParallelCLIP.does, reason)
        return clip


class ParallelCLIP(comfy.sd.CLIP):
    """A CLIP whose text encoder is in the workers; `clip` has its options and patches."""

    does = "CP CLIP encodes"

    def __init__(
        self, clip: comfy.sd.CLIP, native: comfy.sd.CLIP, spec: ModelSpec, request: ParallelRequest | None
    ) -> None:
        self.__dict__.update(vars(clip.clone() if clip is native else clip))
        self._native, self._spec, self._request, self.logged = native, spec, request, set[str]()
        patcher = clip.patcher
        size = patcher.model_size()
        self.patcher = EncoderPatcher(patcher.model, patcher.load_device, patcher.offload_device, size=size)
        copy_state(patcher, self.patcher)
        self.cond_stage_model = RemoteEncoder(self, native.cond_stage_model, spec, request)

    encode_from_tokens = remote_vae.in_workers(comfy.sd.CLIP, "encode_from_tokens")
    encode_from_tokens_scheduled = remote_vae.in_workers(comfy.sd.CLIP, "encode_from_tokens_scheduled")
    generate = remote_vae.in_workers(comfy.sd.CLIP, "generate")

    @contextmanager
    def using_workers(self) -> Iterator[None]:
        packs = code_names.packs_named(self._spec.loader)
        code_names.check_usable(packs)
        # Layers or weights, but for patches, that were changed before, workers find when they load the files.
        if mapped.network_fingerprint(self._native.patcher) != self._spec.weights_fingerprint:
            raise Refused("clip.edited", title=self._spec.title)
        try:
            yield
            code_names.proven.update(packs)
        except (Refused, WorkerLost) as error:
            if code_names.note_failed_import(packs, error):
                code_names.check_usable(packs)
            raise
        finally:
            self.cond_stage_model.end()

    def clone(self, *args: Any, **kwargs: Any) -> Self:
        """ComfyUI clones a CLIP without dynamic VRAM for hooks."""
        made = comfy.sd.CLIP.clone(self, *args, **kwargs)
        static = any(args) or any(kwargs.values())
        spec = replace(self._spec, dynamic_vram=self._spec.dynamic_vram and not static)
        return type(self)(made, self._native, spec, self._request)

    def load_model(self, tokens: Any = None) -> EncoderPatcher:
        """Loads nothing here. ComfyUI applies the CLIP's hooks as it loads it."""
        self.patcher.apply_hooks(self.patcher.forced_hooks, force_apply=True)
        return self.patcher

    def get_key_patches(self) -> dict[str, Any]:
        return self.to_native().get_key_patches()

    def state_dict_for_saving(self) -> dict[str, Any]:
        """Returns the weights with all patches merged: only ComfyUI's process saves files."""
        native = self.to_native()
        model_management.load_models_gpu([native.patcher], force_patch_weights=True)
        return native.state_dict_for_saving()

    def to_native(self) -> comfy.sd.CLIP:
        """Returns ComfyUI's own CLIP with the options, patches and hooks of this one."""
        static = mapped.has_dynamic_vram() and self._native.is_dynamic() and not self._spec.dynamic_vram
        native = self._native.clone(disable_dynamic=True) if static else self._native.clone()
        vars(native).update({name: getattr(self, name) for name in OPTIONS})
        copy_state(self.patcher, native.patcher)
        return native


class Abandoned(Exception):
    """The prompt that wanted an encoding is over."""


class RemoteEncoder:
    """Replaces `cond_stage_model` of `clip`, for the methods that ComfyUI's CLIP calls. `native` is ComfyUI's own text
    encoder. One that `records` raises Recorded at its first call, instead of computing it."""

    def __init__(
        self, clip: comfy.sd.CLIP, native: Any, spec: ModelSpec, request: ParallelRequest | None, *,
        records: bool = False,
    ) -> None:  # fmt: skip
        self._clip, self._native, self._spec, self._request, self._records = clip, native, spec, request, records
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
            comfy_memory.free_model(self._spec, self._request)
        self._called = False

    def recording(self, clip: comfy.sd.CLIP) -> Self:
        """Returns a text encoder for `clip` that raises Recorded at its first call."""
        return type(self)(clip, self._native, self._spec, self._request, records=True)

    def encode_ahead(self, calls: Callable[[], list[Call]], prompt: str) -> list[Encoding]:
        """Begins to compute these calls on another thread, if the workers are idle. Of errors nodes learn as they
        ask."""
        encodings, begun = list[Encoding](), Event()
        try:
            spec = model_source.with_patches(self._spec, self._clip.patcher)
            with leased_if_idle(spec, remote_vae.placement_for(self._request)) as lease:
                if lease is None:
                    return []
                own = model_management.get_torch_device()
                if own.type != "cpu" and lease.loaded is None and str(own) in lease.group.placement.devices:
                    return []  # as it loads on ComfyUI's own GPU, memory would look free to nodes that run meanwhile
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
        """Returns the result of a call. The workers also compute others that nodes will make, which are kept; where
        they refuse, this one alone."""
        call, prompts = self._described(method, arguments), get_progress_state().handlers.get(NAME)
        if self._records:
            raise Recorded(call)
        returned = prompts.take(call) if prompts is not None else None
        if returned is None:
            self._called = True
            encodes = method == "encode_token_weights"
            others = prompts.beside(self._clip) if prompts is not None and encodes else []
            try:
                returned, *rest = self._encode([call, *others])
            except (NotParallel, Refused):
                if not others:
                    raise
                (returned,), others, rest = self._encode([call]), [], []
            if prompts is not None:
                prompts.keep(others, rest)
        here = model_management.intermediate_device()
        return tree_map_only(Tensor, lambda tensor: tensor.to(here), returned)

    def _described(self, method: EncoderMethod, arguments: dict[str, Any]) -> Call:
        patcher, of_packs = self._clip.patcher, describer()
        tokens, estimate = next(iter(arguments.values())), getattr(self._native, "memory_estimation_function", None)
        needed = 0 if estimate is None else int(estimate(tokens, device=patcher.load_device))  # for activations
        model_source.check_encoder(patcher, of_pack=bool(code_names.packs_named(self._spec.loader)))
        weight_patches = model.describe_weight_patches(patcher, of_packs)
        if of_packs.packs:
            raise NotParallel(say("clip.patched", what=min(of_packs.packs)))
        return Call(
            spec=model_source.with_patches(self._spec, patcher),
            request=self._request,
            method=method,
            described=model_source.describe_encoding(patcher, arguments, self._options),
            weight_patches=weight_patches,
            size=encoder_size(patcher, staged=method != "generate", workspace=max(_least_workspace(patcher), needed)),
        )

    def _encode(self, calls: Sequence[Call]) -> list[Any]:
        with lease_workers(calls[0].spec, remote_vae.placement_for(self._request), work="prompt") as lease:
            return self._run(lease, *self._prepare(lease, calls), progress_bar())

    def _prepare(self, lease: Lease, calls: Sequence[Call]) -> tuple[RunPlan, EncodingJob]:
        """Places the encoder, claims memory for it, and makes one job of these calls of one CLIP. Raises NotParallel,
        Refused."""
        size = max((call.size for call in calls), key=lambda size: size.workspace)
        placed = self._place(lease, size, len(calls))
        placement, weights = lease.group.placement, dict(zip(placed.ranks, placed.weight_bytes, strict=True))
        ranks = range(placement.world_size)
        needed = Estimate(
            weight_bytes_by_rank=tuple(weights.get(rank, 0) for rank in ranks),
            activation_bytes_by_rank=tuple(size.workspace * (rank in weights) for rank in ranks),
            buffer_bytes_by_rank=tuple(placed.buffer_bytes * (rank in weights) for rank in ranks),
        )
        degrees = Parallelism(data_degree=placement.world_size)
        plan = RunPlan(degrees=degrees, placement=placement, weights=placed.weights, estimate=needed)
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
        limited_by = comfy_memory.LIMIT if comfy_memory.user_limits(group.placement.world_size) else ""
        placed = place_encoder(size, comfy_memory.room_bytes(group, self._spec), budgets, limited_by, prompts=copies)
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


def encoder_size(patcher: ModelPatcher, *, staged: bool, workspace: int) -> EncoderSize:
    """Returns the bytes of a CLIP's text encoder for a call that may be `staged`."""
    layers, blocks = ([*map(model_management.module_size, units)] for units in encoder_units(patcher.model))
    return EncoderSize(
        layers=tuple(layers),
        blocks=tuple(blocks),
        other=max(0, patcher.model_size() - sum(layers) - sum(blocks)),
        workspace=workspace,
        staged=staged and type(patcher.model).__module__ not in GENERATE_WHILE_ENCODING,
    )


def explain_encoder(clip: Any, plan: RunPlan, capacity: Capacity) -> tuple[str, ...]:
    """Returns sentences on where the text encoder of a CLIP, with or without CP CLIP, goes beside a planned network."""
    remote = isinstance(clip.cond_stage_model, RemoteEncoder)
    try:
        if not remote:
            model_source.describe_clip(clip)
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
    return 0 if patcher.load_device.type == "cpu" else int(model_management.minimum_inference_memory())
