"""CP VAE and CP CLIP: take a VAE or a CLIP, and return the same with its network in the workers. ComfyUI's own code
stays around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from comfy_api.latest import io
from torch.overrides import TorchFunctionMode

from ...parallel_runtime.errors import Refused, WorkerLost
from ...parallel_runtime.group.worker_group import SharedOutput
from ...parallel_runtime.loading.code_names import check_usable, note_failed_import, packs_named, proven
from ...parallel_runtime.loading.mapped import has_dynamic_vram
from ...parallel_runtime.request import ParallelRequest
from ...parallel_runtime.specs import ModelSpec
from ..describe.clip import check_weights, describe_clip
from ..describe.host import announce_refusals
from ..describe.vae import NotParallel, describe_vae
from ..remote.comfy_memory import CPU, WeightlessPatcher, WorkerModel
from ..remote.remote_encoder import EncoderPatcher, RemoteEncoder, copy_state
from ..remote.remote_vae import InWorkers, RemoteVAE, in_workers, placement_for, warn
from ..server.settings import refresh, request_from
from .cp_sampler import CATEGORY, WORKERS_INPUT

OPTIONS = ("apply_hooks_to_conds", "layer_idx", "tokenizer", "tokenizer_options", "use_clip_schedule")  # of a CLIP


class CPVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPVAE",
            display_name="CP VAE",
            category=CATEGORY,
            description="Makes any VAE node run on all GPUs: each decodes or encodes a share of the rows, in a share "
            "of the memory, with the same result.",
            search_aliases=["vae decode", "vae encode", "multi gpu", "parallel vae", "tiled vae", "context parallel"],
            inputs=[
                io.Vae.Input("vae", tooltip="From Load VAE or Load Checkpoint."),
                WORKERS_INPUT,
            ],
            outputs=[io.Vae.Output(tooltip="For every node that takes a VAE.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, vae: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        refresh()
        request = None if cp_config is None else request_from(cp_config)
        placement_for(request)  # raises Refused before the rest of the graph runs
        return io.NodeOutput(parallel_vae(vae, request))


def parallel_vae(vae: comfy.sd.VAE, request: ParallelRequest | None) -> comfy.sd.VAE:
    """Returns `vae` with its network in the workers, or `vae` itself, with a warning in the log, where workers cannot
    have it."""
    vae.throw_exception_if_invalid()
    native = vae.native if isinstance(vae, ParallelVAE) else vae
    try:
        return ParallelVAE(native, RemoteVAE(native, describe_vae(native), request))
    except NotParallel as reason:
        warn(ParallelVAE.does, reason)
        return vae


class ParallelVAE(InWorkers, comfy.sd.VAE):
    """A VAE whose network is in the workers. Its `native` VAE does the calls that they refuse."""

    does = "CP VAE decodes and encodes"

    def __init__(self, native: comfy.sd.VAE, remote: RemoteVAE) -> None:
        super().__init__()
        self.__dict__.update(vars(native))
        self.native = native
        self.first_stage_model = remote
        # It has no weights to move: the lease claims memory for the workers'.
        self.patcher = WeightlessPatcher(WorkerModel(), native.device, CPU, size=1)
        self.memory_used_decode = lambda shape, dtype: native.memory_used_decode(shape, dtype) / remote.workers
        self.memory_used_encode = lambda shape, dtype: native.memory_used_encode(shape, dtype) / remote.workers

    decode, decode_tiled = in_workers(comfy.sd.VAE, "decode"), in_workers(comfy.sd.VAE, "decode_tiled")
    encode, encode_tiled = in_workers(comfy.sd.VAE, "encode"), in_workers(comfy.sd.VAE, "encode_tiled")

    @contextmanager
    def using_workers(self) -> Iterator[None]:
        try:
            with SharedOutputMode(self.first_stage_model):
                yield
        finally:
            self.first_stage_model.end()

    def to_native(self) -> comfy.sd.VAE:
        return self.native

    def get_sd(self) -> dict[str, Any]:
        return self.native.get_sd()


class SharedOutputMode(TorchFunctionMode):
    """Allocates the output of a VAE, for which ComfyUI calls torch.empty, where the workers can write to it."""

    def __init__(self, remote: RemoteVAE) -> None:
        super().__init__()
        self._remote = remote

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._remote.output = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and self._is_output(args, kwargs):
            self._remote.output = SharedOutput(self._remote.output_shape, kwargs["dtype"])
            return self._remote.output.tensor
        return func(*args, **kwargs)

    def _is_output(self, args: Any, kwargs: Any) -> bool:
        shape = self._remote.output_shape
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        return bool(shape) and all(shape) and args == (shape,) and on_cpu and "dtype" in kwargs


class CPCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPCLIP",
            display_name="CP CLIP",
            category=CATEGORY,
            description="Makes any node that encodes a prompt use a text encoder in the workers, on the GPU with the "
            "most room beside the network, with the same result.",
            search_aliases=["clip text encode", "text encoder", "multi gpu", "t5", "qwen", "context parallel"],
            inputs=[
                io.Clip.Input("clip", tooltip="From Load CLIP, DualCLIPLoader or Load Checkpoint."),
                WORKERS_INPUT,
            ],
            outputs=[io.Clip.Output(tooltip="For every node that takes a CLIP.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, clip: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        if clip is None:
            raise Refused("clip.none")
        return io.NodeOutput(parallel_clip(clip, encoding_request(cp_config)))


def encoding_request(cp_config: ParallelRequest | None) -> ParallelRequest | None:
    """Returns which workers encode. Raises Refused, before the rest of the graph runs, where there are none."""
    refresh()
    request = None if cp_config is None else request_from(cp_config)
    placement_for(request)
    return request


def parallel_clip(clip: comfy.sd.CLIP, request: ParallelRequest | None) -> comfy.sd.CLIP:
    """Returns `clip` with its text encoder in the workers, or `clip` itself, with a warning in the log, where workers
    cannot have it."""
    native = clip.to_native() if isinstance(clip, ParallelCLIP) else clip
    try:
        return ParallelCLIP(native, native, describe_clip(native), request)
    except (NotParallel, Refused) as reason:
        warn(ParallelCLIP.does, reason)
        return clip


class ParallelCLIP(InWorkers, comfy.sd.CLIP):
    """A CLIP whose text encoder is in the workers; `clip` has its options and patches."""

    does = "CP CLIP encodes"

    def __init__(
        self,
        clip: comfy.sd.CLIP,
        native: comfy.sd.CLIP,
        spec: ModelSpec,
        request: ParallelRequest | None,
    ) -> None:
        super().__init__()
        self.__dict__.update(vars(clip.clone() if clip is native else clip))
        self._native, self._spec, self._request = native, spec, request
        self.patcher = EncoderPatcher.of(clip.patcher)
        self.cond_stage_model = RemoteEncoder(self, native.cond_stage_model, spec, request)

    encode_from_tokens = in_workers(comfy.sd.CLIP, "encode_from_tokens")
    encode_from_tokens_scheduled = in_workers(comfy.sd.CLIP, "encode_from_tokens_scheduled")
    generate = in_workers(comfy.sd.CLIP, "generate")

    @contextmanager
    def using_workers(self) -> Iterator[None]:
        packs = packs_named(self._spec.loader)
        check_usable(packs)
        check_weights(self._native.patcher, self._spec)
        try:
            yield
            proven.update(packs)
        except (Refused, WorkerLost) as error:
            if note_failed_import(packs, error):
                check_usable(packs)
            raise
        finally:
            self.cond_stage_model.end()

    def clone(self, *args: Any, **kwargs: Any) -> ParallelCLIP:
        """ComfyUI clones a CLIP without dynamic VRAM for hooks."""
        made = comfy.sd.CLIP.clone(self, *args, **kwargs)
        static = any(args) or any(kwargs.values())
        spec = replace(self._spec, dynamic_vram=self._spec.dynamic_vram and not static)
        return ParallelCLIP(made, self._native, spec, self._request)

    def load_model(self, tokens: Any = None) -> EncoderPatcher:
        """Loads nothing here. ComfyUI applies the CLIP's hooks as it loads it."""
        self.patcher.apply_hooks(self.patcher.forced_hooks, force_apply=True)
        return self.patcher

    def get_key_patches(self) -> dict[str, Any]:
        patches: dict[str, Any] = self.to_native().get_key_patches()
        return patches

    def state_dict_for_saving(self) -> dict[str, Any]:
        """Returns the weights with all patches merged: only ComfyUI's process saves files."""
        native = self.to_native()
        comfy.model_management.load_models_gpu([native.patcher], force_patch_weights=True)
        state: dict[str, Any] = native.state_dict_for_saving()
        return state

    def to_native(self) -> comfy.sd.CLIP:
        """Returns ComfyUI's own CLIP with the options, patches and hooks of this one."""
        static = has_dynamic_vram() and self._native.is_dynamic() and not self._spec.dynamic_vram
        native = self._native.clone(disable_dynamic=True) if static else self._native.clone()
        vars(native).update({name: getattr(self, name) for name in OPTIONS})
        copy_state(self.patcher, native.patcher)
        return native
