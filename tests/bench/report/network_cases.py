"""ComfyUI's own FLUX.1 and Wan 2.1 with random weights, at their published widths or tiny: divided over the ranks,
against undivided on this one. Runs where `comfy` can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from parallel_runtime.architectures import Architecture, architecture_of
from parallel_runtime.architectures.network_modules import blocks_of
from parallel_runtime.commands.report import randomized
from parallel_runtime.engine.comm.mesh import ContextMesh, build_mesh
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.engine.prefetch import BlockPrefetcher, Buffers, rank_placement
from parallel_runtime.engine.weight_sources import WeightSource
from parallel_runtime.specs import Parallelism, WeightPlacement, WeightsMode

from .attention_cases import parallelisms
from .measuring import Case, Clock, Measurement, Setting, mean_error, unbroken

Shape = tuple[int, ...]
WEIGHTS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network by its class, "module:name" below comfy.ldm, and its configuration; the shapes of what it is given."""

    name: str
    path: str
    config: dict[str, Any]
    latent: Shape
    text: Shape
    pooled: int = 0

    def build(self, weights: torch.dtype, device: torch.device) -> nn.Module:
        """Builds the network as ComfyUI does, with layers that cast their weights as they compute."""
        import comfy.ops

        from parallel_runtime.loading.code_names import named  # which imports ComfyUI

        kind = named(f"comfy.ldm.{self.path}")
        torch.manual_seed(0)
        return randomized(kind(**self.config, dtype=weights, device=device, operations=comfy.ops.manual_cast))

    def inputs(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        shapes: dict[str, Shape] = {"x": self.latent, "context": self.text}
        shapes |= {"y": (1, self.pooled)} if self.pooled else {}
        made = {name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes.items()}
        made |= {"guidance": torch.full((1,), 3.5, device=device, dtype=dtype)} if self.pooled else {}
        return made | {"timestep": torch.full((1,), 0.5, device=device, dtype=dtype)}


FLUX = Subject(
    name="FLUX, 1024 x 1024", path="flux.model:Flux", latent=(1, 16, 128, 128), text=(1, 512, 4096), pooled=768,
    config=dict(
        image_model="flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
        mlp_ratio=4.0, num_heads=24, depth=19, depth_single_blocks=38, axes_dim=[16, 56, 56], theta=10000,
        patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
    ),
)  # fmt: skip
WAN = Subject(
    name="Wan 14B, 10 of its 40 blocks, 832 x 480, 81 frames", path="wan.model:WanModel", latent=(1, 16, 21, 60, 104),
    text=(1, 512, 4096),
    config=dict(
        model_type="t2v", in_dim=16, dim=5120, ffn_dim=13824, freq_dim=256, text_dim=4096, out_dim=16, num_heads=40,
        num_layers=10,
    ),
)  # fmt: skip
ON_ONE_CARD = (  # what several ranks have room for there
    replace(
        FLUX, name="FLUX, 1024 x 1024, 9 of its 57 blocks", config=FLUX.config | dict(depth=3, depth_single_blocks=6)
    ),
    replace(
        WAN,
        name="Wan 14B, 3 of its 40 blocks, 832 x 480, 21 frames",
        config=WAN.config | dict(num_layers=3),
        latent=(1, 16, 6, 60, 104),
    ),
)
TINY = (
    replace(
        FLUX, name="FLUX, tiny", latent=(1, 16, 9, 14), text=(1, 7, 96), pooled=64,
        config=FLUX.config | dict(
            vec_in_dim=64, context_in_dim=96, hidden_size=192, num_heads=3, depth=2, depth_single_blocks=2,
            axes_dim=[16, 24, 24],
        ),
    ),
    replace(
        WAN, name="Wan, tiny", latent=(1, 16, 3, 6, 10), text=(1, 7, 96),
        config=WAN.config | dict(dim=192, ffn_dim=256, freq_dim=64, text_dim=96, num_heads=3, num_layers=2),
    ),
)  # fmt: skip


def subjects(setting: Setting) -> tuple[Subject, ...]:
    return TINY if setting.tiny else ON_ONE_CARD if setting.one_card else (FLUX, WAN)


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    for subject in subjects(setting):
        for dtype, weights in WEIGHTS.items():
            labels = {"what": subject.name, "weights": dtype}
            yield from unbroken(labels, _of_subject(subject, weights, labels, setting, device))


def plan_of(network: nn.Module) -> Architecture:
    architecture = architecture_of(network)
    assert architecture is not None, f"no plan for {type(network)}"
    return architecture


def _of_subject(
    subject: Subject, weights: torch.dtype, labels: Measurement, setting: Setting, device: torch.device
) -> Iterator[Case]:
    network = subject.build(weights, device)
    inputs = subject.inputs(device)
    clock = Clock(lambda: network(**inputs, transformer_options={}), device)
    plain = clock.run()

    def error() -> Measurement:
        return {"error": mean_error(clock.run(), plain)}

    def case(words: str, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> Case:
        return Case(labels | {"degrees": words}, error, None if setting.one_card else clock.eager, within)

    yield case("ComfyUI's own")
    for number, (words, parallelism) in enumerate([*parallelisms(setting.world_size)] or [("1 rank", Parallelism())]):
        mesh = build_mesh(parallelism, device)
        for mode in get_args(WeightsMode) if number == 0 else ("replicate",):
            if mode != "shard" or setting.world_size > 1:
                degrees = words if mode == "replicate" else f"{words}, {mode}"
                yield case(degrees, partial(divided, network, mesh, parallelism, mode))


@contextmanager
def divided(
    network: nn.Module, mesh: ContextMesh, parallelism: Parallelism, mode: WeightsMode = "replicate"
) -> Iterator[None]:
    """Splits the network over `mesh` in this context, with the weights of its blocks placed by `mode`."""
    plan, device = plan_of(network).plan, next(network.parameters()).device
    placement = rank_placement(WeightPlacement(mode=mode), mesh.context, device, Buffers(device))
    with ExitStack() as undo:
        parallelize(network, plan, mesh, parallelism)
        undo.callback(unparallelize, network)
        if placement is not None:
            undo.enter_context(prefetched(network, blocks_of(network, plan), placement.source(), placement.buffers))
        yield


@contextmanager
def prefetched(
    network: nn.Module, blocks: Sequence[nn.Module], source: WeightSource, buffers: Buffers
) -> Iterator[None]:
    """Has the weights of these blocks fetched from `source` in this context; the original weights stay too."""
    original = {module: dict(module._parameters) for block in blocks for module in block.modules()}
    prefetcher = BlockPrefetcher(network, source, buffers)
    try:
        for block in blocks:
            prefetcher.add(block)
        prefetcher.seal()
        yield
    finally:
        prefetcher.close()
        for module, parameters in original.items():
            module._parameters.update(parameters)
