"""What a preview or a callback of a pack may do in the middle of a run on the workers, and what a run leaves behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .pack import node_module, pack_module

import comfy.model_management  # isort: skip  # the pack's module has made ComfyUI importable
import comfy.sample  # isort: skip
import comfy.samplers  # isort: skip
import comfy.sd  # isort: skip
import torch  # isort: skip
from comfy_extras.nodes_custom_sampler import Noise_EmptyNoise, SamplerCustomAdvanced  # isort: skip
from torch import Tensor  # isort: skip

from .vae_scenes import _cp_vae  # isort: skip

demo, remote, routes = (node_module(name) for name in ("classes.cp_loaders", "remote.sampling_run", "routes"))
readings = pack_module("parallel_runtime.wire.messages").Readings
errors, specs = pack_module("parallel_runtime.errors"), pack_module("parallel_runtime.specs")
runtime = pack_module("parallel_runtime.group.runtime").runtime

sys.argv[1:] = ["--cpu", "--force-fp32", "--use-pytorch-cross-attention"]  # as this ComfyUI runs, its workers shall
ONE = pack_module("parallel_runtime.request").ParallelRequest(devices="cpu")


def in_a_callback(rank: int, world: int, what: str) -> dict[str, Any]:
    """Somebody does `what` in the middle of a run: what becomes of that run and of the next one."""
    model = demo.CPDemoModel.execute().result[0]
    recorded_bytes = readings.recorded_bytes
    try:
        want = _sampled(model)
        readings.recorded_bytes = lambda *_: 1 << 20  # as on a GPU, where forwards are recorded as CUDA graphs
        group = runtime.live
        seen: list[Any] = []
        act = {
            "free": comfy.model_management.unload_all_models,
            "free a little": _free_a_little,
            "load": lambda: comfy.model_management.load_models_gpu([demo.CPDemoModel.execute().result[0]]),
            "free by the page": lambda: seen.append(routes._unload_models()),
            "sample": lambda: _sampled(model),
            "sample, and go on": lambda: _refused(seen, lambda: _sampled(model)),
            "sample natively": lambda: comfy.sample.sample(model, *run_arguments()),
            "decode": lambda: seen.append(_decoded()),
            "look": lambda: seen.append(runtime.status().state),
            "end when idle": lambda: (setattr(runtime, "idle_seconds", 1e-9), runtime.status()),
            "restart": lambda: runtime.restart("a callback asked for it", group.comfy),
        }[what]
        error, got = "", None
        try:
            got = _sampled(model, lambda step: act() if step == 1 else None)
        except errors.ParallelError as raised:
            error = f"{type(raised).__name__}: {raised}"
        left = len(group.models)
        runtime.idle_seconds = 0
        same = runtime.live is group
        return {
            "error": error,
            "equal": got is not None and torch.equal(got, want),
            "seen": seen,
            "left": left,
            "same group": same,
            "again": torch.equal(_sampled(model), want),
        }
    finally:
        readings.recorded_bytes = recorded_bytes
        runtime.idle_seconds = 0


def _free_a_little() -> None:
    """Has ComfyUI free less than a model, for which it asks the model to unload a part of itself."""
    device = torch.device("cpu")
    comfy.model_management.free_memory(comfy.model_management.get_free_memory(device) + 1000, device)


def _refused(seen: list[Any], act: Callable[[], Any]) -> None:
    with suppress(errors.Refused):
        act()
        seen.append("not refused")


def _decoded() -> bool:
    """Does a CP VAE give the picture of the VAE that it was made of?"""
    native, ours = _cp_vae()
    latent = torch.randn(1, native.latent_channels, 2, 4, 4, generator=torch.Generator().manual_seed(4))
    pictures = []
    for vae in (native, ours):
        torch.manual_seed(4)  # this VAE draws noise
        pictures.append(vae.decode(latent))
    return torch.equal(*pictures)


def run_arguments() -> tuple[Any, ...]:
    dice = torch.Generator().manual_seed(3)
    positive, negative = (demo.CPDemoConditioning.execute(text).result[0] for text in ("a red circle", "a blue square"))
    return (
        torch.randn(1, 16, 8, 8, generator=dice),
        3,
        2.0,
        "euler",
        "simple",
        positive,
        negative,
        torch.zeros(1, 16, 8, 8),
    )


def _sampled(model: Any, act: Callable[[int], Any] = lambda step: None) -> Tensor:
    return comfy.sample.sample(
        remote.model_on_workers(model, ONE),
        *run_arguments(),
        callback=lambda step, *_: act(step),
        disable_pbar=True,
        seed=5,
    )


def drawn_in_a_row(rank: int, world: int, times: int) -> list[list[float]]:
    """How far several runs, whose sampler draws from torch's own generator, are from ComfyUI's, output by output."""
    runs = zip(_drawn(times, False), _drawn(times, True), strict=True)
    return [[float((ours - want).abs().max()) for want, ours in zip(*run, strict=True)] for run in runs]


def _drawn(times: int, on_workers: bool) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    model = demo.CPDemoModel.execute().result[0]
    *_, positive, negative, latent = run_arguments()
    sampler = comfy.samplers.ksampler("euler", {"s_churn": 1.0, "s_noise": 1.0})
    drawn = []
    for _ in range(times):
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(2.0)
        if on_workers:
            guider = remote.guider_on_workers(guider, ONE)
        sigmas, samples = torch.tensor([1.0, 0.7, 0.4, 0.0]), {"samples": latent}
        out = SamplerCustomAdvanced.execute(Noise_EmptyNoise(), guider, sampler, sigmas, samples).result
        drawn.append((out[0]["samples"], out[1]["samples"]))
    return drawn


def delivered(rank: int, world: int, steps: list[list[float]], last: list[float]) -> list[list[float]]:
    """What a callback is given, [step, x0] each, of these `steps` that arrived and of the run's `last`."""
    given: list[list[float]] = []
    watcher = remote.StepCallback(lambda step, x0, x, total: given.append([step, float(x0)]), torch.device("cpu"))
    for step, x0 in steps:
        watcher.on_step(int(step), torch.tensor(x0), torch.tensor(x0), 4)
    watcher.finish((int(last[0]), torch.tensor(last[1]), torch.tensor(last[1]), 4))
    return given


def path_of_a_link(rank: int, world: int, folder: str) -> str:
    """The path by which workers are told of a file that ComfyUI loads by a link to it."""
    os.symlink(demo.MODEL, link := os.path.join(folder, "chosen.safetensors"))
    (file,) = node_module("describe.model_source").model_spec(comfy.sd.load_diffusion_model(link)).files
    return file.path
