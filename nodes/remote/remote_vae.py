"""CP VAE's VAE, whose network is in the workers: each decode or encode of a tensor is one request to them. What they
refuse of a VAE or a CLIP, ComfyUI's own code computes (`in_workers`)."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import comfy.sd
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...parallel_runtime.architectures.autoencoders import COMPARED, Tiles
from ...parallel_runtime.errors import Refused, WorkerFailed
from ...parallel_runtime.group.history import LeasedFor
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.group.worker_group import SharedOutput
from ...parallel_runtime.jobs import VAEJob
from ...parallel_runtime.loading.random_states import random_states, set_random_states
from ...parallel_runtime.planning import network_stats, run_plan
from ...parallel_runtime.request import ParallelRequest, parse_devices, requested_shares
from ...parallel_runtime.specs import ModelSpec, Parallelism, Placement, VAEMethod
from ..describe import host
from ..describe.model_files import NotParallel, check_vae, vae_spec
from . import comfy_memory
from .lease import Lease, lease_workers, progress_bar

log = logging.getLogger(__name__)


def in_workers(owner: type, name: str) -> Callable[..., Any]:
    """Returns ComfyUI's method of this name, which uses the workers' network, or the native one where they refuse. Its
    object has a context of one call (`using_workers`), gives ComfyUI's own for one (`to_native`), and knows what it
    `does`, by the name of the node that made it, and which reasons were `logged`: each is once."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.using_workers():
                return getattr(owner, name)(self, *args, **kwargs)
        except (NotParallel, Refused) as reason:
            if str(reason) not in self.logged:
                self.logged.add(str(reason))
                warn(self.does, reason)
        return getattr(self.to_native(), name)(*args, **kwargs)

    return method


def warn(does: str, reason: Exception) -> None:
    log.warning("[CP] %s in ComfyUI's process: %s", does, reason)


@dataclass(eq=False, repr=False)
class RemoteVAE:
    """Replaces `first_stage_model`. By `comfy_has_chunked_io` ComfyUI passes the memory of the IMAGE to `decode`."""

    comfy_has_chunked_io = True
    _vae: comfy.sd.VAE
    _spec: ModelSpec
    _request: ParallelRequest | None
    output: SharedOutput | None = None  # the next decodes write to it
    output_shape: tuple[int, ...] = ()  # the last shape that `decode_output_shape` returned

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
        comfy_memory.free_model(self._spec, self._request)

    def _convert(self, method: VAEMethod, x: Tensor, unit: int, output: SharedOutput, part: Tensor) -> None:
        """Decodes or encodes `x` into this part of `output`. `unit`: pixels in a row of the latent."""
        self._check(method, x, unit)
        vae, placement, chunk_bytes = self._vae, placement_for(self._request), 0
        if function := COMPARED[self._spec.kind].chunk_size:
            # ComfyUI would split a video in time in so many bytes on this device: one number for all ranks.
            module, _, name = function.partition(":")
            chunk_bytes = int(getattr(import_module(module), name)(vae.device))
        work: LeasedFor = "decoding" if method == "decode" else "encoding"
        with lease_workers(self._spec, placement, work=work) as lease:
            plan, shares = self._plan(lease, method, tuple(x.shape))
            # Memory that is still missing refuses nothing: ComfyUI's estimate is high, and its VAE goes on with tiles.
            lease.claim(plan)
            job = VAEJob(
                method=method, x=x, unit=unit, shape=list(part.shape), dtype=str(part.dtype).removeprefix("torch."),
                offset=output.offset_of(part) or 0, random_states=random_states(vae.device), chunk_bytes=chunk_bytes,
                weights=None if self._spec.loader else dict(vae.get_sd()), shares=shares,
            )  # fmt: skip
            try:
                result = lease.run(plan, job, output=output.fd, on_step=progress_bar())
            except WorkerFailed as failed:
                if failed.cause.kind == "out_of_memory":  # ComfyUI goes on with tiles
                    log.warning("[CP] VAE: %s", failed)
                    raise torch.OutOfMemoryError(str(failed)) from failed
                raise
        set_random_states(result.value["random_states"], vae.device)
        grid = self.tiles.grid(vae.first_stage_model, method, tuple(x.shape)) if self.tiles else None
        workers = min(len(placement.devices), grid.count if grid else max(x.shape[-2:]) // unit)
        seconds = result.seconds, result.load_seconds
        done = "VAE decoded" if method == "decode" else "VAE encoded"
        log.info("[CP] %s on %d worker(s) in %.2f s, loaded in %.2f s", done, workers, *seconds)

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

    def _plan(self, lease: Lease, method: VAEMethod, shape: tuple[int, ...]) -> tuple[run_plan.RunPlan, list[int]]:
        """Returns a plan with the bytes of the weights and of each worker's activations, and the shares of the rows:
        the requested ones, else fewer for a device with too little memory for as many as the others. Of tiles these
        are shares of their number."""
        vae, placement = self._vae, lease.group.placement
        estimate = vae.memory_used_decode if method == "decode" else vae.memory_used_encode
        full_bytes, weight_bytes = int(estimate(shape, vae.vae_dtype)), int(vae.model_size())
        devices, shares = placement.devices, list[int]()
        if self._request is not None:
            count = len(parse_devices(self._request.devices, host.visible_gpus(), host.gpu_kind()))
            asked = requested_shares(self._request.shares, placement.world_size, count, placement.nnodes)
            shares = list(asked[: len(devices)]) if any(asked[: len(devices)]) else []
        if self.tiles is None:
            if not shares:  # equal ones, where each worker's memory suffices
                budgets = [None if one is None else one - weight_bytes for one in lease.budget_bytes()[: len(devices)]]
                if shares := list(network_stats.shares_within(full_bytes, budgets)):
                    each = zip(devices, shares, strict=True)
                    percent = ", ".join(f"{device} {share / sum(shares):.0%}" for device, share in each)
                    log.info("[CP] VAE: rows are divided by free memory: %s", percent)
            parts = shares or [1] * len(devices)
            activations = [int(full_bytes * part / sum(parts)) for part in parts]
        else:  # the first worker alone blends whole pictures
            tile = self.tiles.grid(vae.first_stage_model, method, shape).tile
            tile_bytes = int(estimate((*shape[:2], *tile), vae.vae_dtype))
            activations = [full_bytes, *[tile_bytes] * (len(devices) - 1)]
        world = placement.world_size
        activations += [0] * (world - len(devices))  # on other machines
        needed = run_plan.Estimate(
            weight_bytes_by_rank=(weight_bytes,) * world, activation_bytes_by_rank=tuple(activations),
            buffer_bytes_by_rank=(0,) * world,
        )  # fmt: skip
        return run_plan.RunPlan(degrees=Parallelism(ring_degree=world), placement=placement, estimate=needed), shares


def parallel_vae(vae: comfy.sd.VAE, request: ParallelRequest | None) -> comfy.sd.VAE:
    """Returns `vae` with its network in the workers, or `vae` itself, with a warning in the log, where workers cannot
    have it."""
    vae.throw_exception_if_invalid()
    native = vae.native if isinstance(vae, ParallelVAE) else vae
    try:
        check_vae(native)
        return ParallelVAE(native, RemoteVAE(native, vae_spec(native), request))
    except NotParallel as reason:
        warn(ParallelVAE.does, reason)
        return vae


class ParallelVAE(comfy.sd.VAE):
    """A VAE whose network is in the workers. Its `native` VAE does the calls that they refuse."""

    does = "CP VAE decodes and encodes"

    def __init__(self, native: comfy.sd.VAE, remote: RemoteVAE) -> None:
        self.__dict__.update(vars(native))
        self.native, self.logged = native, set[str]()
        self.first_stage_model = remote
        # It has no weights to move: the lease claims memory for the workers'.
        self.patcher = comfy_memory.WeightlessPatcher(
            comfy_memory.WorkerModel(), native.device, comfy_memory.CPU, size=1
        )
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
        shape = self._remote.output_shape
        is_output = func is torch.empty and shape and all(shape) and args == (shape,) and "dtype" in kwargs
        if is_output and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            self._remote.output = SharedOutput(shape, kwargs["dtype"])
            return self._remote.output.tensor
        return func(*args, **kwargs)


def checked_request(cp_config: ParallelRequest | None) -> ParallelRequest | None:
    """Returns which workers are asked for. Raises Refused, before the rest of the graph runs, where there are none."""
    host.refresh()
    request = None if cp_config is None else host.request_from(cp_config)
    placement_for(request)
    return request


def placement_for(request: ParallelRequest | None) -> Placement:
    """Returns a VAE's workers: as requested, else the live group, else all default devices. Raises Refused."""
    group = runtime.live
    live = group.placement if group is not None else None
    if request is None:
        return live or host.plan_without_model(ParallelRequest(devices=runtime.default_devices)).placement
    placement = host.plan_without_model(replace(request, shares="equal")).placement
    if live is not None and request.by_heads and set(live.devices) <= set(placement.devices):
        return live  # a sampler's model may need fewer
    return host.last_used(request, placement)


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
