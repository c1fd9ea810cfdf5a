"""What stands in a VAE where its network was: a decode or encode of one tensor is one request to the workers."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from torch import Tensor

from ..parallel_runtime.autoencoders import COMPARED
from ..parallel_runtime.errors import Refused, WorkerFailed
from ..parallel_runtime.host.devices import parse_devices
from ..parallel_runtime.host.group import Result
from ..parallel_runtime.host.room import Room
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.host.shares import asked_for, that_fit
from ..parallel_runtime.host.storing import Prospect
from ..parallel_runtime.jobs import VAEJob
from ..parallel_runtime.random_states import random_states, set_random_states
from ..parallel_runtime.specs import Division, ModelSpec, Parallelism, ParallelRequest, Placement, Storage, VAEMethod
from .describe_vae import Undivided
from .lease import Lease, leased
from .workers import gpu_kind, plan_any, usual_for, visible_gpus

log = logging.getLogger(__name__)


class RemoteVAE:
    """ComfyUI hands a VAE with this mark the memory that becomes the IMAGE; anything else is asked of the original."""

    comfy_has_chunked_io = True

    def __init__(self, vae: comfy.sd.VAE, spec: ModelSpec, request: ParallelRequest | None) -> None:
        self._vae = vae
        self._spec = spec
        self._request = request
        self.room: Room | None = None  # for the next outputs
        self.expected: tuple[int, ...] = ()  # the shape that ComfyUI was told of last

    def __getattr__(self, name: str) -> Any:
        """The network's. How to copy or to store it is not for the network to say, and while a copy is made there is
        none."""
        if name.startswith("__") or "_vae" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no {name}", name=name, obj=self)
        return getattr(self._vae.first_stage_model, name)

    @property
    def workers(self) -> int:
        return len(placement_for(self._request).devices)

    def decode_output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        vae = self._vae
        if hasattr(vae.first_stage_model, "decode_output_shape"):
            self.expected = tuple(vae.first_stage_model.decode_output_shape(shape))
        else:
            channels = getattr(vae, "conv_out_channels", vae.output_channels)
            self.expected = (shape[0], channels, *_sizes(shape[2:], vae.upscale_ratio, lambda n, by: n * by))
        return self.expected

    def decode(self, x: Tensor, output_buffer: Tensor | None = None, **options: Any) -> Tensor:
        if options:
            raise Undivided(f"it is given {', '.join(options)}")
        shape = self.decode_output_shape(tuple(x.shape)) if output_buffer is None else tuple(output_buffer.shape)
        dtype = x.dtype if output_buffer is None else output_buffer.dtype
        if self.room is not None and output_buffer is not None:
            offset = self.room.offset_of(output_buffer)
            if offset is not None:
                self._convert("decode", x, 1, self.room, offset, shape)
                return output_buffer
        with _room(shape, dtype) as room:
            self._convert("decode", x, 1, room, 0, shape)
        return room.tensor.to(x.device) if output_buffer is None else output_buffer.copy_(room.tensor)

    def encode(self, x: Tensor, device: torch.device | None = None) -> Tensor:
        unit = self._vae.spacial_compression_encode()
        latent = _sizes(tuple(x.shape[2:]), self._vae.downscale_ratio, lambda n, by: n // by)
        shape = (x.shape[0], self._vae.latent_channels, *latent)
        with _room(shape, x.dtype) as room:
            self._convert("encode", x, unit, room, 0, shape)
        return room.tensor.to(device or x.device)

    def decode_tiled(self, *args: Any, **kwargs: Any) -> Tensor:
        """Asked of networks that make tiles themselves."""
        raise Undivided("its tiles are its own")

    encode_tiled = decode_tiled

    def settle(self) -> None:
        """Do after a use what the user wants done with it."""
        group = runtime.live
        held = group.held.get(self._spec.unpatched) if group is not None else None
        if held is not None and self._request is not None:
            held.settle(self._request.after_sampling)

    def _convert(
        self,
        method: VAEMethod,
        x: Tensor,
        unit: int,
        room: Room,
        offset: int,
        shape: tuple[int, ...],
    ) -> None:
        self._check(method, x, unit)
        placement = placement_for(self._request)
        with leased(self._spec, placement) as lease:
            shares = self._claim(lease, method, tuple(x.shape))
            job = VAEJob(
                method=method,
                x=x,
                unit=unit,
                shape=list(shape),
                dtype=str(room.tensor.dtype).removeprefix("torch."),
                offset=offset,
                random_states=random_states(self._vae.device),
                chunk_bytes=self._chunk_bytes(),
                weights=None if self._spec.loader else dict(self._vae.get_sd()),
                shares=shares,
            )
            result = self._asked(lease, job, room)
        set_random_states(result.value["random_states"], self._vae.device)
        log.info(
            "[CP] VAE %sd on %d worker(s) in %.2f s, loaded in %.2f s",
            method, min(len(placement.devices), max(x.shape[-2:]) // unit), result.seconds, result.load_seconds,
        )  # fmt: skip

    def _check(self, method: VAEMethod, x: Tensor, unit: int) -> None:
        """What ComfyUI would fail at is for it to say; an error in a worker ends the group."""
        channels = self._vae.latent_channels if method == "decode" else self._vae.output_channels
        if x.shape[1] != channels:
            raise Undivided(f"it takes {channels} channels, and got {x.shape[1]}")
        if not (x.shape[-2] // unit and x.shape[-1] // unit):
            raise Undivided(f"{x.shape[-1]} x {x.shape[-2]} pixels make no row of a latent")

    def _asked(self, lease: Lease, job: VAEJob, room: Room) -> Result:
        bar: comfy.utils.ProgressBar | None = None

        def on_step(frames: int, x0: Any, x: Any, total: int) -> None:
            nonlocal bar
            bar = bar or comfy.utils.ProgressBar(total)
            bar.update_absolute(frames, total)

        placement = lease.group.placement
        by_rows = Division(degrees=Parallelism(ring_degree=placement.world_size), placement=placement)
        try:
            return lease.run(by_rows, job, room=room.fd, on_step=on_step)
        except Refused as refused:
            raise Undivided(str(refused)) from None
        except WorkerFailed as failed:
            if failed.out_of_memory:  # ComfyUI goes on with tiles
                log.warning("[CP] VAE: %s", failed)
                raise torch.OutOfMemoryError(str(failed)) from failed
            raise

    def _claim(self, lease: Lease, method: VAEMethod, shape: tuple[int, ...]) -> list[int]:
        """Have ComfyUI make room: for all of the weights, and each worker's share of the activations. What is missing
        then is no reason to refuse: this is ComfyUI's own estimate, which is high, and it goes on with tiles. Returns
        the shares of the rows: as asked for, else a card with too little memory for as many as the others has fewer."""
        vae, placement = self._vae, lease.group.placement
        whole = (vae.memory_used_decode if method == "decode" else vae.memory_used_encode)(shape, vae.vae_dtype)
        weights = int(vae.model_size())
        shares = shares_for(self._request, placement) or self._by_room(lease, int(whole), weights)
        parts = shares or [1] * len(placement.devices)
        each = [int(whole * part / sum(parts)) for part in parts]
        elsewhere = [0] * (placement.world_size - len(parts))
        lease.claim(Prospect(storage=Storage(), held=(weights,) * placement.world_size), each + elsewhere)
        return shares

    def _by_room(self, lease: Lease, whole: int, weights: int) -> list[int]:
        """Shares of the rows where some worker has no room for as many as the others; none: all alike."""
        devices = lease.group.placement.devices
        rooms = [room if room is None else room - weights for room in lease.rooms()[: len(devices)]]
        shares = that_fit(whole, rooms)
        if shares:
            each = zip(devices, shares, strict=True)
            told = ", ".join(f"{device} {share / sum(shares):.0%}" for device, share in each)
            log.info("[CP] VAE: rows by the memory of each worker: %s", told)
        return list(shares)

    def _chunk_bytes(self) -> int:
        """What ComfyUI would cut time by here: asked once, so that no rank goes by its own memory."""
        function = COMPARED[self._spec.kind].chunk_size
        if not function:
            return 0
        module, _, name = function.partition(":")
        return int(getattr(import_module(module), name)(self._vae.device))


def placement_for(request: ParallelRequest | None) -> Placement:
    """The workers that a VAE uses: as asked; else the group that is there; else one on every device. Raises Refused."""
    group = runtime.live
    live = group.placement if group is not None else None
    if request is None:
        return live or plan_any(ParallelRequest()).placement
    asked = plan_any(replace(request, shares="equal")).placement
    if live is not None and request.by_heads and set(live.devices) <= set(asked.devices):
        return live  # a sampler's model may need fewer
    return usual_for(request, asked)


def shares_for(request: ParallelRequest | None, placement: Placement) -> list[int]:
    """Of the rows, for the workers of ComfyUI's machine; none: all alike. Raises Refused."""
    if request is None:
        return []
    every = len(parse_devices(request.devices, visible_gpus(), gpu_kind()))
    asked = asked_for(request.shares, placement.world_size, every, placement.nnodes)
    here = asked[: len(placement.devices)]
    return list(here) if any(here) else []


def _sizes(sizes: tuple[int, ...], ratio: Any, scale: Any) -> list[int]:
    """In pixels or latents, by ComfyUI's ratio: one number, or one number or function for each dim."""
    ratios = ratio if isinstance(ratio, tuple) else (ratio,) * len(sizes)
    if len(ratios) != len(sizes):
        raise Undivided(f"it takes {len(ratios)} dims, and got {len(sizes)}")
    return [int(by(size)) if callable(by) else int(scale(size, by)) for size, by in zip(sizes, ratios, strict=True)]


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> Room:
    if not all(shape):
        raise Undivided(f"a result of {shape} is empty")
    return Room(shape, dtype)
