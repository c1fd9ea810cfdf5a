"""The network of a VAE in the workers: each decode or encode of a tensor is one request to them. What they refuse of a
VAE or a CLIP, ComfyUI's own code computes (`InWorkers`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor

from ...parallel_runtime.architectures.autoencoders import COMPARED, Tiles
from ...parallel_runtime.errors import Refused, WorkerFailed
from ...parallel_runtime.group.history import LeasedFor
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.group.worker_group import Result, SharedOutput
from ...parallel_runtime.jobs import VAEJob
from ...parallel_runtime.loading.random_states import random_states, set_random_states
from ...parallel_runtime.planning.network_stats import shares_within
from ...parallel_runtime.planning.run_plan import Estimate, RunPlan
from ...parallel_runtime.request import ParallelRequest, parse_devices, requested_shares
from ...parallel_runtime.specs import ModelSpec, Parallelism, Placement, VAEMethod
from ..describe.host import gpu_kind, last_used, plan_without_model, visible_gpus
from ..describe.vae import NotParallel, check_vae
from .comfy_memory import free_model
from .lease import Lease, lease_workers, progress_bar

log = logging.getLogger(__name__)


class InWorkers:
    """`does` says what it does, by the name of the node that made it."""

    does: str

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def to_native(self) -> Any:
        """Returns ComfyUI's own object, for one call."""
        raise NotImplementedError

    def using_workers(self) -> AbstractContextManager[Any]:
        """Returns the context of one call."""
        raise NotImplementedError

    def warn(self, reason: Exception) -> None:
        """Logs each reason once."""
        if str(reason) not in self._logged:
            self._logged.add(str(reason))
            warn(self.does, reason)


def in_workers(owner: type, name: str) -> Callable[..., Any]:
    """Returns ComfyUI's method of this name, which uses the workers' network, or the native one where they refuse."""

    def method(self: InWorkers, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.using_workers():
                return getattr(owner, name)(self, *args, **kwargs)
        except (NotParallel, Refused) as reason:
            self.warn(reason)
        return getattr(self.to_native(), name)(*args, **kwargs)

    return method


def warn(does: str, reason: Exception) -> None:
    log.warning("[CP] %s in ComfyUI's process: %s", does, reason)


class RemoteVAE:
    """Replaces `first_stage_model`. By `comfy_has_chunked_io` ComfyUI passes the memory of the IMAGE to `decode`."""

    comfy_has_chunked_io = True

    def __init__(self, vae: comfy.sd.VAE, spec: ModelSpec, request: ParallelRequest | None) -> None:
        self._vae = vae
        self._spec = spec
        self._request = request
        self.output: SharedOutput | None = None  # the next decodes write to it
        self.output_shape: tuple[int, ...] = ()  # the last shape that `decode_output_shape` returned

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the native network, except for copying and pickling, and none before `__init__`."""
        if name.startswith("__") or "_vae" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)
        return getattr(self._vae.first_stage_model, name)

    @property
    def workers(self) -> int:
        return len(placement_for(self._request).devices)

    @property
    def tiles(self) -> Tiles | None:
        return COMPARED[self._spec.kind].tiles

    def decode_output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        vae = self._vae
        if hasattr(vae.first_stage_model, "decode_output_shape"):
            self.output_shape = tuple(vae.first_stage_model.decode_output_shape(shape))
        else:
            channels = getattr(vae, "conv_out_channels", vae.output_channels)
            self.output_shape = (shape[0], channels, *_sizes(shape[2:], vae.upscale_ratio, lambda n, by: n * by))
        return self.output_shape

    def decode(self, x: Tensor, output_buffer: Tensor | None = None, **options: Any) -> Tensor:
        if options:
            raise NotParallel(f"it is given {', '.join(options)}")
        shape = self.decode_output_shape(tuple(x.shape)) if output_buffer is None else tuple(output_buffer.shape)
        dtype = self._result_dtype(x) if output_buffer is None else output_buffer.dtype
        if self.output is not None and output_buffer is not None and self.output.offset_of(output_buffer) is not None:
            self._convert("decode", x, 1, self.output, output_buffer)
            return output_buffer
        output = _new_output(shape, dtype)
        self._convert("decode", x, 1, output, output.tensor)
        return output.tensor.to(x.device) if output_buffer is None else output_buffer.copy_(output.tensor)

    def encode(self, x: Tensor, device: torch.device | None = None) -> Tensor:
        unit = self._vae.spacial_compression_encode()
        latent = _sizes(tuple(x.shape[2:]), self._vae.downscale_ratio, lambda n, by: n // by)
        if self.tiles is not None and x.ndim == 5:
            latent[0] = self.tiles.grid(self._vae.first_stage_model, "encode", tuple(x.shape)).frames
        shape = (x.shape[0], self._vae.latent_channels, *latent)
        output = _new_output(shape, self._result_dtype(x))
        self._convert("encode", x, unit, output, output.tensor)
        return output.tensor.to(device or x.device)

    def decode_tiled(self, x: Tensor, **sizes: Any) -> Tensor:
        """ComfyUI calls this on a network that makes tiles itself, which those of `tiles` do in any case."""
        if self.tiles is None:
            raise NotParallel("it makes its own tiles")
        return self.decode(x)

    def encode_tiled(self, x: Tensor, **sizes: Any) -> Tensor:
        if self.tiles is None:
            raise NotParallel("it makes its own tiles")
        return self.encode(x)

    def _result_dtype(self, x: Tensor) -> torch.dtype:
        """Returns that of the native network's result: those of `tiles` blend in float32."""
        return x.dtype if self.tiles is None else torch.float32

    def end(self) -> None:
        """Keeps, offloads or unloads the VAE after a decode or encode, as the user chose."""
        free_model(self._spec, self._request)

    def _convert(self, method: VAEMethod, x: Tensor, unit: int, output: SharedOutput, part: Tensor) -> None:
        """Decodes or encodes `x` into this part of `output`. `unit`: pixels in a row of the latent."""
        self._check(method, x, unit)
        placement = placement_for(self._request)
        work: LeasedFor = "decoding" if method == "decode" else "encoding"
        with lease_workers(self._spec, placement, work=work) as lease:
            plan, shares = self._plan(lease, method, tuple(x.shape))
            # Memory that is still missing refuses nothing: ComfyUI's estimate is high, and its VAE goes on with tiles.
            lease.claim(plan)
            job = VAEJob(
                method=method, x=x, unit=unit, shape=list(part.shape), dtype=str(part.dtype).removeprefix("torch."),
                offset=output.offset_of(part) or 0, random_states=random_states(self._vae.device),
                chunk_bytes=self._chunk_bytes(), weights=None if self._spec.loader else dict(self._vae.get_sd()),
                shares=shares,
            )  # fmt: skip
            result = _run(lease, plan, job, output)
        set_random_states(result.value["random_states"], self._vae.device)
        tiles, network = self.tiles, self._vae.first_stage_model
        parts = tiles.grid(network, method, tuple(x.shape)).count if tiles else max(x.shape[-2:]) // unit
        workers = min(len(placement.devices), parts)
        what, seconds = "VAE decoded" if method == "decode" else "VAE encoded", (result.seconds, result.load_seconds)
        log.info("[CP] %s on %d worker(s) in %.2f s, loaded in %.2f s", what, workers, *seconds)

    def _check(self, method: VAEMethod, x: Tensor, unit: int) -> None:
        """Raises NotParallel for a changed VAE, and for tensors at which it fails, which would end the group."""
        check_vae(self._vae)
        channels = self._vae.latent_channels if method == "decode" else self._vae.output_channels
        if x.shape[1] != channels:
            raise NotParallel(f"it takes {channels} channels, and got {x.shape[1]}")
        if not (x.shape[-2] // unit and x.shape[-1] // unit):
            raise NotParallel(f"{x.shape[-1]} x {x.shape[-2]} pixels make no row of a latent")
        if self.tiles is None or method == "decode":
            return
        if x.ndim != 5 or min(x.shape[-2:]) // unit < self.tiles.least_rows or x.shape[-2] % unit or x.shape[-1] % unit:
            raise NotParallel(f"it does not encode {x.shape[-1]} x {x.shape[-2]} pixels")

    def _plan(self, lease: Lease, method: VAEMethod, shape: tuple[int, ...]) -> tuple[RunPlan, list[int]]:
        """Returns a plan with the bytes of the weights and of each worker's activations, and the shares of the rows:
        the requested ones, else fewer for a device with too little memory for as many as the others. Of tiles these
        are shares of their number."""
        vae, placement = self._vae, lease.group.placement
        estimate = vae.memory_used_decode if method == "decode" else vae.memory_used_encode
        full_bytes, weight_bytes = int(estimate(shape, vae.vae_dtype)), int(vae.model_size())
        shares = shares_for(self._request, placement)
        if self.tiles is None:
            shares = shares or self._shares_by_memory(lease, full_bytes, weight_bytes)
            parts = shares or [1] * len(placement.devices)
            activations = [int(full_bytes * part / sum(parts)) for part in parts]
        else:  # the first worker alone blends whole pictures
            tile = self.tiles.grid(vae.first_stage_model, method, shape).tile
            tile_bytes = int(estimate((*shape[:2], *tile), vae.vae_dtype))
            activations = [full_bytes, *[tile_bytes] * (len(placement.devices) - 1)]
        world = placement.world_size
        activations += [0] * (world - len(placement.devices))  # on other machines
        needed = Estimate(
            weight_bytes_by_rank=(weight_bytes,) * world, activation_bytes_by_rank=tuple(activations),
            buffer_bytes_by_rank=(0,) * world,
        )  # fmt: skip
        return RunPlan(degrees=Parallelism(ring_degree=world), placement=placement, estimate=needed), shares

    def _shares_by_memory(self, lease: Lease, full_bytes: int, weight_bytes: int) -> list[int]:
        """Returns shares of the rows by each worker's memory; none where it suffices for equal shares."""
        devices = lease.group.placement.devices
        budgets = lease.budget_bytes()[: len(devices)]
        shares = shares_within(full_bytes, [None if budget is None else budget - weight_bytes for budget in budgets])
        if shares:
            each = zip(devices, shares, strict=True)
            percent = ", ".join(f"{device} {share / sum(shares):.0%}" for device, share in each)
            log.info("[CP] VAE: rows are divided by free memory: %s", percent)
        return list(shares)

    def _chunk_bytes(self) -> int:
        """Returns the bytes in which ComfyUI would split a video in time on this device: one number for all ranks."""
        function = COMPARED[self._spec.kind].chunk_size
        if not function:
            return 0
        module, _, name = function.partition(":")
        return int(getattr(import_module(module), name)(self._vae.device))


def _run(lease: Lease, plan: RunPlan, job: VAEJob, output: SharedOutput) -> Result:
    try:
        return lease.run(plan, job, output=output.fd, on_step=progress_bar())
    except WorkerFailed as failed:
        if failed.cause.kind == "out_of_memory":  # ComfyUI goes on with tiles
            log.warning("[CP] VAE: %s", failed)
            raise torch.OutOfMemoryError(str(failed)) from failed
        raise


def placement_for(request: ParallelRequest | None) -> Placement:
    """Returns a VAE's workers: as requested, else the live group, else all default devices. Raises Refused."""
    group = runtime.live
    live = group.placement if group is not None else None
    if request is None:
        return live or plan_without_model(ParallelRequest(devices=runtime.default_devices)).placement
    placement = plan_without_model(replace(request, shares="equal")).placement
    if live is not None and request.by_heads and set(live.devices) <= set(placement.devices):
        return live  # a sampler's model may need fewer
    return last_used(request, placement)


def shares_for(request: ParallelRequest | None, placement: Placement) -> list[int]:
    """Returns the requested shares of the rows for the workers of ComfyUI's machine; [] = equal. Raises Refused."""
    if request is None:
        return []
    devices = len(parse_devices(request.devices, visible_gpus(), gpu_kind()))
    shares = requested_shares(request.shares, placement.world_size, devices, placement.nnodes)
    local = shares[: len(placement.devices)]
    return list(local) if any(local) else []


def _sizes(sizes: tuple[int, ...], ratio: Any, scale: Any) -> list[int]:
    """Scales `sizes` by ComfyUI's ratio: one number for all dims, or a number or function for each."""
    ratios = ratio if isinstance(ratio, tuple) else (ratio,) * len(sizes)
    if len(ratios) != len(sizes):
        raise NotParallel(f"it takes {len(ratios)} dims, and got {len(sizes)}")
    return [int(by(size)) if callable(by) else int(scale(size, by)) for size, by in zip(sizes, ratios, strict=True)]


def _new_output(shape: tuple[int, ...], dtype: torch.dtype) -> SharedOutput:
    if not all(shape):
        raise NotParallel(f"a result of {shape} is empty")
    return SharedOutput(shape, dtype)
