"""CP VAE: ComfyUI's own VAEs with random weights, decoded by the workers, against this process alone.

Runs where `comfy` can be imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_runtime.architectures.autoencoders import kind_of
from parallel_runtime.commands.report import randomized
from parallel_runtime.group.worker_group import SharedOutput, WorkerGroup
from parallel_runtime.jobs import VAEJob
from parallel_runtime.loading.fingerprint import model_fingerprint
from parallel_runtime.loading.random_states import random_states
from parallel_runtime.specs import ModelSpec, Parallelism, Placement

from .group_cases import memory_measurement
from .measuring import Case, Measurement, Setting, clocked, mean_error

KL = "comfy.ldm.modules.diffusionmodules.model"
KL_CONFIG = dict(double_z=True, z_channels=16, resolution=256, in_channels=3, out_ch=3, ch=128, ch_mult=[1, 2, 4, 4],
                 num_res_blocks=2, attn_resolutions=[], dropout=0.0)  # fmt: skip


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    subjects = []
    for name, (make, latent) in _vaes(setting.tiny).items():
        subject = VAEDecode(make, latent, dtype, device)
        subjects.append((name, subject))
        yield Case({"what": name, "workers": "none, ComfyUI's process"}, subject.alone)
    for count in sorted({1, setting.world_size}):
        with WorkerGroup(Placement(devices=setting.devices[:count]), setting.comfy) as group:
            for name, subject in subjects:
                for what, act in (("", subject.divided), (", after Free memory", subject.freed)):
                    yield Case({"what": f"{name}{what}", "workers": count}, partial(act, group))


class VAEDecode:
    """One VAE and one latent."""

    def __init__(
        self, make: Callable[[], nn.Module], latent: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        import comfy.sd

        weights = {name: value.contiguous() for name, value in randomized(make()).state_dict().items()}
        self._vae: Any = comfy.sd.VAE(sd=weights, dtype=dtype)
        self._device = device
        self._x = torch.randn(latent, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        self._spec = self._described(self._vae.first_stage_model, dtype)

    def _described(self, model: nn.Module, dtype: torch.dtype) -> ModelSpec:
        """Describes the VAE with weights on two devices, as ComfyUI's dynamic VRAM leaves them."""
        model.get_submodule("encoder").to(self._device)
        arguments = json.dumps({"tae_latent_channels": self._x.shape[1]})
        return ModelSpec(
            loader="", arguments=arguments, weight_dtype=str(dtype).removeprefix("torch."), kind=kind_of(model),
            weights_fingerprint=model_fingerprint(model, dtype),
        )  # fmt: skip

    def alone(self) -> Measurement:
        model = self._vae.first_stage_model.to(self._device, self._x.dtype)
        self._expected = model.decode(self._x)
        times = clocked(lambda: model.decode(self._x), self._device)
        self._vae.first_stage_model.to("cpu")
        return {"seconds": times["ms"] / 1e3} | {name: gib for name, gib in times.items() if name == "gib"}

    def divided(self, group: WorkerGroup) -> Measurement:
        """Times the second decode: the first one loads, and compares a small picture with an undivided one."""
        output = SharedOutput(self._expected.shape, self._expected.dtype)
        degrees = Parallelism(ring_degree=group.placement.world_size)
        for _ in range(2):
            result = group.run(self._spec, degrees, self._job(), output=output.fd)
        error = mean_error(output.tensor, self._expected.cpu())
        return {"error": error, "seconds": result.seconds} | memory_measurement(group)

    def freed(self, group: WorkerGroup) -> Measurement:
        group.free(self._spec)
        return memory_measurement(group)

    def _job(self) -> VAEJob:
        return VAEJob(
            method="decode", x=self._x, unit=1, shape=list(self._expected.shape),
            dtype=str(self._expected.dtype).removeprefix("torch."), offset=0, random_states=random_states(self._device),
            chunk_bytes=0, weights=dict(self._vae.get_sd()),
        )  # fmt: skip


def _vaes(tiny: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Returns a function that makes each VAE, and the shape of its latent. ComfyUI fixes the width of FLUX's."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine
    from comfy.ldm.wan.vae import WanVAE

    flux = partial(
        AutoencodingEngine,
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{KL}.Encoder", "params": KL_CONFIG},
        decoder_config={"target": f"{KL}.Decoder", "params": KL_CONFIG},
    )
    wan = partial(
        WanVAE, dim=16 if tiny else 96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    if tiny:
        return {"FLUX's VAE, tiny latent": (flux, (1, 16, 7, 6)), "Wan's VAE, tiny": (wan, (1, 16, 2, 6, 5))}
    return {
        "FLUX's VAE, 1024 x 1024": (flux, (1, 16, 128, 128)),
        "Wan's VAE, 832 x 480, 33 frames": (wan, (1, 16, 9, 60, 104)),
    }
