"""Seconds a step, and how far apart the results are: ComfyUI's FLUX with random weights, sampled by the product's own
workers on 1, 2, 4, ... devices, as CP Plan's Measure does with the user's model.

Its blocks have their published width, but are few, so that a temporary file has room for them.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ParallelError, Refused
from ...group.worker_group import WorkerGroup
from ...jobs import EvaluationJob
from ...loading.fingerprint import stat_file
from ...specs import ComfySetup, ModelSpec, Parallelism, Placement
from ...worker.comfy_loop.comfyui import import_comfyui
from .page import Measurement

GIB = 2**30
WARM_UP, STEPS = 4, 5  # the first ones load, and are recorded as CUDA graphs
CONFIG: dict[str, Any] = dict(
    image_model="flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
    mlp_ratio=4.0, num_heads=24, depth=2, depth_single_blocks=4, axes_dim=[16, 56, 56], theta=10000, patch_size=2,
    qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
TINY = CONFIG | dict(vec_in_dim=64, context_in_dim=128, hidden_size=256, num_heads=2, depth_single_blocks=2)
SHARED = "on one device: only the error counts"


def placements(worlds: Sequence[int], gpus: int) -> list[Placement]:
    """Returns the devices of as many workers as each number of `worlds`; without `gpus` on the CPU. One GPU is also
    tried by two workers, for their error. Raises Refused where all numbers are larger than that of the GPUs."""
    if not gpus:
        return [Placement(devices=("cpu",) * world) for world in worlds]
    found = [Placement(devices=tuple(f"cuda:{n}" for n in range(world))) for world in worlds if world <= gpus]
    if gpus == 1 and 2 in worlds:
        found.append(Placement(devices=("cuda:0", "cuda:0")))
    if not found:
        raise Refused("report.world", world=min(worlds), gpus=gpus)
    return found


def divisions(world_size: int) -> Iterator[tuple[str, Parallelism]]:
    """Yields the ways to divide one sequence over this many workers, by name."""
    both = {(2, world_size // 2)} if world_size % 4 == 0 else set()
    for ring, ulysses in sorted({(world_size, 1), (1, world_size)} | both):
        yield f"ring {ring} x Ulysses {ulysses}", Parallelism(ring_degree=ring, ulysses_degree=ulysses)


def measurements(comfyui: str, placements: Sequence[Placement]) -> Iterator[Measurement]:
    """Yields a row for each start of a group and each division over its workers. An error is a row, too."""
    on_cpu = placements[0].device_kind == "cpu"
    flags = ("--cpu", "--use-pytorch-cross-attention") if on_cpu else ()
    setup = ComfySetup(root=comfyui, flags=flags, folder=os.getcwd())
    import_comfyui(setup, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        spec, job = _flux(Path(folder, "flux.safetensors"), tiny=on_cpu)
        exact: Tensor | None = None
        for placement in placements:
            labels: Measurement = {"workers": placement.world_size}
            labels |= {"note": SHARED} if placement.shared and not on_cpu else {}
            try:
                for row, out in _of_group(placement, setup, spec, job):
                    exact = out if exact is None else exact
                    error = {} if out is None or exact is None else {"error": mean_error(out, exact)}
                    yield labels | row | error
            except ParallelError as error:
                yield labels | {"what": "the rest of these workers", "failed": str(error)}


def _of_group(
    placement: Placement, setup: ComfySetup, spec: ModelSpec, job: EvaluationJob
) -> Iterator[tuple[Measurement, Tensor | None]]:
    started = time.monotonic()
    with WorkerGroup(placement, setup) as group:
        row: Measurement = {"what": "start of the workers", "seconds": time.monotonic() - started}
        if group.profile is not None and group.profile.bytes_per_second:
            row["links"] = group.profile.bytes_per_second / 1e9
        yield row, None
        for words, degrees in divisions(placement.world_size):
            results = [group.run(spec, degrees, job) for _ in range(WARM_UP + STEPS)]
            seconds = statistics.median(result.seconds for result in results[WARM_UP:])
            used = {"gib": max(reading.used_bytes for reading in group.readings) / GIB} if group.readings else {}
            yield {"what": "a step", "degrees": words, "seconds": seconds, **used}, results[-1].value["out"].clone()


def _flux(path: Path, *, tiny: bool) -> tuple[ModelSpec, EvaluationJob]:
    """Writes the network to a file, and returns what workers load and evaluate."""
    import comfy.ldm.flux.model
    import comfy.ops
    import comfy.utils

    from ...loading.object_codec import Describer  # which imports ComfyUI

    config, dtype = (TINY, torch.float32) if tiny else (CONFIG, torch.bfloat16)
    torch.manual_seed(0)
    network = comfy.ldm.flux.model.Flux(**config, dtype=dtype, device="cpu", operations=comfy.ops.disable_weight_init)
    comfy.utils.save_torch_file(randomized(network).state_dict(), str(path))
    rows, text = (9, 7) if tiny else (128, 512)
    arguments = {
        "x": torch.randn(1, 16, rows, rows, dtype=dtype),
        "timestep": torch.full((1,), 0.5, dtype=dtype),
        "context": torch.randn(1, text, config["context_in_dim"], dtype=dtype),
        "y": torch.randn(1, config["vec_in_dim"], dtype=dtype),
        "guidance": torch.full((1,), 3.5, dtype=dtype),
    }
    name = str(dtype).removeprefix("torch.")
    spec = ModelSpec(
        loader="comfy.sd:load_diffusion_model", arguments=json.dumps([str(path), {"dtype": {"torch.dtype": name}}]),
        files=(stat_file(str(path)),), weight_dtype=name,
    )  # fmt: skip
    return spec, EvaluationJob(
        call_arguments=arguments,
        options=Describer().described({}),
        cond_arguments={},
        weight_patches=None,
        batch_coupled=False,
    )


def randomized(network: nn.Module) -> nn.Module:
    """Returns the network with random weights that keep numbers about as large as they are."""
    for name, parameter in network.named_parameters():
        deviation = max(parameter[0].numel() if parameter.ndim > 1 else 100, 1) ** -0.5
        around = 1.0 if parameter.ndim < 2 and name.endswith(("weight", "scale")) else 0.0
        value = torch.randn(parameter.shape, device=parameter.device) * deviation + around
        parameter.data = value.to(parameter.dtype)
    return network.eval().requires_grad_(False)


def mean_error(out: Tensor, exact: Tensor) -> float:
    """Returns the mean difference, in standard deviations of the exact result; NaN where one is."""
    return float((out.double() - exact.double()).abs().mean() / exact.double().std()) if out.numel() else 0.0
