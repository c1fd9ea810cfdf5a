"""Cases that ranks run on whole transformers. Errors are max |difference| over the reference's standard deviation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from parallel_runtime.architectures.split_plan import ModulePlan
from parallel_runtime.for_diffusers import attach, detach
from parallel_runtime.for_diffusers.plans import plan_of

from .meshes import mesh, parallelism
from .tiny import build, inputs


@torch.no_grad()
def forward_error(
    rank: int,
    world: int,
    kind: str,
    degrees: list[int],
    model: dict[str, Any] | None = None,
    call: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    replicated: list[str] | None = None,
) -> float:
    """How far the attached transformer is from the plain one."""
    transformer = build(kind, **(model or {}))
    made = inputs(kind, **(call or {}))
    references = _flat(transformer(**made, return_dict=False))
    attach(transformer, mesh(*degrees), parallelism(*degrees, **(options or {})), replicated=replicated or ())
    outputs = _flat(transformer(**made, return_dict=False))
    return max(error(got, reference) for got, reference in zip(outputs, references, strict=True))


def _flat(outputs: tuple[Any, ...]) -> list[Tensor]:
    """Some give a list, an item for each row of the batch."""
    return [out for item in outputs for out in (item if isinstance(item, list) else [item])]


def output(transformer: nn.Module, made: dict[str, Any]) -> Tensor:
    return transformer(**made, return_dict=False)[0]


def error(got: Tensor, reference: Tensor) -> float:
    assert got.shape == reference.shape, f"{tuple(got.shape)} instead of {tuple(reference.shape)}"
    assert not got.isnan().any(), "NaN"
    return float((got.double() - reference.double()).abs().max() / reference.double().std())


@torch.no_grad()
def errors_after_attaching_again(rank: int, world: int, kind: str, all_degrees: list[list[int]]) -> list[float]:
    """One transformer attached, run, and detached with one set of degrees after another; last, plain again."""
    transformer = build(kind)
    made = inputs(kind)
    reference = output(transformer, made)
    errors = []
    for degrees in all_degrees:
        attach(transformer, mesh(*degrees), parallelism(*degrees))
        errors += [error(output(transformer, made), reference)]
        detach(transformer)
    assert torch.equal(output(transformer, made), reference), "detach left something behind"
    return errors


@torch.no_grad()
def error_on_a_mesh_of_the_callers(rank: int, world: int, names: list[str]) -> float:
    """Two of the four ranks share a sequence by Ulysses; the other dim is not ours."""
    shape = tuple(1 if name == "ring" else 2 for name in names)
    theirs = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
    transformer = build("flux")
    made = inputs("flux")
    reference = output(transformer, made)
    attach(transformer, theirs, parallelism(1, 2))
    return error(output(transformer, made), reference)


@torch.inference_mode()
def errors_with_sharded_weights(rank: int, world: int) -> list[float]:
    """FSDP2 over the ranks that share the sequence, before and after attach."""
    errors = []
    for attach_first in (True, False):
        transformer, made = build("flux"), inputs("flux")
        reference = output(transformer, made)
        if attach_first:
            attach(transformer, mesh(2, 1), parallelism(2, 1))
        for block in [*transformer.transformer_blocks, *transformer.single_transformer_blocks, transformer]:  # type: ignore[misc, list-item]
            fully_shard(block, mesh=mesh(2, 1).device_mesh)
        if not attach_first:
            attach(transformer, mesh(2, 1), parallelism(2, 1))
        errors.append(error(output(transformer, made), reference))
    return errors


@torch.no_grad()
def replicated_text(rank: int, world: int, degrees: list[int]) -> list[float]:
    """FLUX's text after its last double block, as this rank holds it: every bit of it, and its length."""
    transformer: Any = build("flux")
    attach(transformer, mesh(*degrees), parallelism(*degrees), replicated=["text"])
    seen: list[Tensor] = []
    transformer.transformer_blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out[0]))
    output(transformer, inputs("flux", text=7))
    return [float(seen[0].shape[1]), *seen[0].double().flatten().tolist()]


@torch.no_grad()
def error_when_compiled(rank: int, world: int) -> float:
    """Repeated blocks through dynamo, which breaks its graph at the collectives."""
    transformer, made = build("wan"), inputs("wan")
    reference = output(transformer, made)
    attach(transformer, mesh(1, 2), parallelism(1, 2))
    transformer.compile_repeated_blocks(backend="eager")  # type: ignore[operator]
    output(transformer, made)
    return error(output(transformer, made), reference)


@torch.no_grad()
def error_of_local_attention(rank: int, world: int, kind: str, modules: list[str]) -> float:
    """How much it shows if some attentions see only this rank's tokens."""
    transformer: Any = build(kind)
    made = inputs(kind)
    references = transformer(**made, return_dict=False)
    plan = plan_of(transformer)
    sites = tuple(_kept_local(site, modules) for site in plan.module_plans)
    attach(transformer, mesh(2, 1), parallelism(2, 1), replace(plan, module_plans=sites))
    outputs = transformer(**made, return_dict=False)
    return max(error(got, reference) for got, reference in zip(outputs, references, strict=True))


def _kept_local(site: ModulePlan, modules: list[str]) -> ModulePlan:
    return replace(site, submodule_attends={**site.submodule_attends, **dict.fromkeys(modules, "local")})


@torch.no_grad()
def errors_of_changing_sizes(rank: int, world: int) -> list[float]:
    attached, alone = build("qwen"), build("qwen")
    attach(attached, mesh(3, 1), parallelism(3, 1))
    errors = []
    for text, image in ((7, 63), (2, 11), (70, 35)):
        made = inputs("qwen", text=text, image=image, masked=1)
        errors.append(error(output(attached, made), output(alone, made)))
    return errors


@torch.no_grad()
def error_after_a_forward_that_raised(rank: int, world: int) -> float:
    """The first forward dies in its second block, after collectives; the next one has other sizes."""
    transformer = build("flux")
    made = inputs("flux", text=5, image=20)
    reference = output(transformer, made)
    attach(transformer, mesh(1, 2), parallelism(1, 2))

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = transformer.transformer_blocks[1].register_forward_hook(fail)  # type: ignore[union-attr, index, operator]
    try:
        output(transformer, inputs("flux"))
    except RuntimeError:
        handle.remove()
    route = transformer.transformer_blocks[0].attn.processor._parallel_config  # type: ignore[union-attr, index]
    assert not route.streams.lengths, "streams of a forward that raised are still there"
    return error(output(transformer, made), reference)


@torch.no_grad()
def processors_come_back(rank: int, world: int, kind: str) -> None:
    """Those that were replaced are the same objects again after detach, and nothing was set on them."""
    transformer: Any = build(kind)
    before = _processors(transformer)
    attach(transformer, mesh(2, 1), parallelism(2, 1))
    assert _processors(transformer) != before, "none was replaced"
    detach(transformer)
    assert _processors(transformer) == before
    assert not [p for p in before.values() if vars(p)]


def _processors(transformer: nn.Module) -> dict[str, Any]:
    return {name: module.processor for name, module in transformer.named_modules() if hasattr(module, "processor")}


@torch.no_grad()
def others_are_untouched(rank: int, world: int) -> None:
    """While one transformer is attached, another one gives the same bits, and diffusers' settings are as before."""
    attached, other = build("flux"), build("flux")
    made = inputs("flux")
    before = output(other, made)
    listed, active = list(AttentionBackendName), _AttentionBackendRegistry._active_backend
    attach(attached, mesh(2, 1), parallelism(2, 1))
    assert torch.equal(output(other, made), before)
    assert (listed, active) == (list(AttentionBackendName), _AttentionBackendRegistry._active_backend)
    detach(attached)
    assert not [key for module in attached.modules() for key in vars(module) if key.startswith("_context_parallel")]
    assert not [m for m in attached.modules() if m._forward_pre_hooks or m._forward_hooks]
    processors = attached.attn_processors.values()  # type: ignore[union-attr, operator]
    assert not [p for p in processors if {"_parallel_config", "_attention_backend"} & set(vars(p))]
