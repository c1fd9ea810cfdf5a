"""LoRA and its kin, and merged models: KSampler's latent, whatever was merged before."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .cases import ALONE, DEGREES
from .client import Graph, NodeError
from .graphs import Job, Parallel, lora_node, sampling_graph, with_hooks, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_kin import node

BAR = 1e-4  # of the latent's standard deviation, float32
RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=2.0)
PLACES = {
    "flux_dev": (
        "img_in", "double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.0", "single_blocks.0.linear1",
        "single_blocks.1.linear2", "final_layer.adaLN_modulation.1",
    ),
    "qwen_image": ("img_in", "transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.net.2", "proj_out"),
    "wan_t2v": ("blocks.0.self_attn.q", "blocks.1.cross_attn.o", "blocks.0.ffn.0", "time_projection.1"),
}  # fmt: skip

Stack = list[tuple[str, float]]
Tensors = dict[str, Tensor]


@pytest.mark.sweep(one_in=19)
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("family", PLACES)
@pytest.mark.parametrize("degrees", [ALONE, "ring_2", "ulysses_2"])
def test_a_lora_gives_ksamplers_latent(server: Server, degrees: str, family: str, rank: int) -> None:
    stack = [(write(server, f"{family}_{rank}", lora(server, family, rank)), 0.8)]
    check(server, Job(family=family, cfg=2.0), stack, DEGREES[degrees])


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("first", "second"), [(1.0, 0.5), (-0.7, 1.3), (0.0, -1.0)])
def test_two_loras_add_up(server: Server, first: float, second: float) -> None:
    names = [write(server, f"flux_dev_{rank}", lora(server, "flux_dev", rank)) for rank in (4, 16)]
    check(server, FLUX, [(names[0], first), (names[1], second)])


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize("strengths", [[], [0.9]], ids=["no LoRA", "LoRA"])
@pytest.mark.parametrize("weight_dtype", ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast"])
@pytest.mark.parametrize("family", ["flux_dev", "wan_t2v"])
def test_one_worker_gives_the_bits_of_ksamplers_second_run(
    server: Server, family: str, weight_dtype: str, strengths: list[float]
) -> None:
    """In ComfyUI's own dtype where CP_TEST_OWN_DTYPE is set. With dynamic VRAM the first run after loading computes its
    first evaluation with merged weights that are not rounded yet."""
    name = write(server, f"{family}_8", lora(server, family, 8))

    def sampled(sampler: Any, parallel: Parallel | None = None) -> Tensor:
        graph = sampling_graph(Job(family=family, cfg=2.0), sampler, parallel)
        graph["model"]["inputs"]["weight_dtype"] = weight_dtype
        return latent_of(server.client.run(with_loras(graph, [(name, each) for each in strengths])))

    _, second = (sampled("KSampler") for _ in range(2))
    assert torch.equal(sampled("CPSampler", replace(DEGREES["1_worker"], dtype="auto")), second)


def test_strengths_there_and_back_give_the_first_bits(server: Server) -> None:
    first, second = (write(server, f"flux_dev_{rank}", lora(server, "flux_dev", rank)) for rank in (4, 8))
    stacks: list[Stack] = [[(first, 1.0)], [], [(first, 1.0), (second, -0.5)], [(first, 0.3)], [(second, 1.0)]]
    once = [sample(server, FLUX, stack) for stack in stacks]
    workers = server.workers()
    for index in (2, 0, 4, 1, 3, 1, 0):
        assert torch.equal(sample(server, FLUX, stacks[index]), once[index]), stacks[index]
    assert server.workers() == workers
    assert apart(once[0], once[1]) > 0.05, "a LoRA changes the picture"


def test_whole_differences_are_changed_for_others(server: Server) -> None:
    """A patch that is a tensor, no adapter, of the same strength as the one before."""
    dice = torch.Generator().manual_seed(13)
    named = {place: shape for place, shape in sizes(server, "flux_dev").items() if place in ("img_in", "final_layer")}
    first, second = (
        write(server, f"diff_{n}", {f"diffusion_model.{place}.diff": difference(*shape, dice)["diff"]
                                    for place, shape in named.items()})
        for n in (1, 2)
    )  # fmt: skip
    for stack in ([(first, 1.0)], [(second, 1.0)], [(first, 1.0), (second, 1.0)], [(second, 1.0), (first, 1.0)]):
        check(server, FLUX, stack)


@pytest.mark.sweep
def test_a_new_seed_and_a_new_group_keep_the_lora(server: Server) -> None:
    stack = [(write(server, "flux_dev_4", lora(server, "flux_dev", 4)), 1.0)]
    for degrees, seed in (("ring_2", 7), ("ring_2", 8), ("1_worker", 8)):
        check(server, Job(family="flux_dev", cfg=2.0, seed=seed), stack, DEGREES[degrees])


@pytest.mark.sweep
def test_another_model_in_between_does_not_lose_the_lora(server: Server) -> None:
    stack = [(write(server, "flux_dev_4", lora(server, "flux_dev", 4)), 1.0)]
    want = sample(server, FLUX, stack)
    sample(server, Job(family="qwen_image"), [])
    assert torch.equal(sample(server, FLUX, stack), want)


def test_what_comfyui_leaves_out_of_a_lora_is_left_out_at_every_strength(server: Server) -> None:
    """ComfyUI patches no parameter of a module that has layers inside, such as a block's modulation."""
    dice = torch.Generator().manual_seed(14)
    whole = lora(server, "wan_t2v", 4)
    with safe_open(server.base / "models" / "diffusion_models" / "wan_t2v.safetensors", "pt") as file:
        shape = tuple(file.get_slice("blocks.0.modulation").get_shape())
    left_out = {"diffusion_model.blocks.0.modulation.diff": normal(shape, dice, 2.0)}
    name = write(server, "wan_modulation", whole | left_out)
    for strength in (1.0, 0.5):
        check(server, Job(family="wan_t2v", cfg=2.0), [(name, strength)])


def loha(out: int, inner: int, dice: torch.Generator) -> Tensors:
    return {f"hada_w{i}_{part}": normal(shape, dice, 0.3)
            for i in (1, 2) for part, shape in (("a", (out, 4)), ("b", (4, inner)))}  # fmt: skip


def lokr(out: int, inner: int, dice: torch.Generator) -> Tensors:
    return {"lokr_w1": normal((4, 4), dice, 0.2), "lokr_w2": normal((out // 4, inner // 4), dice, 0.2)}


def lokr_factored(out: int, inner: int, dice: torch.Generator) -> Tensors:
    return {"lokr_w1": normal((2, 2), dice, 0.2), "lokr_w2_a": normal((out // 2, 4), dice, 0.2),
            "lokr_w2_b": normal((4, inner // 2), dice, 0.2), "alpha": torch.tensor(3.0)}  # fmt: skip


def dora(out: int, inner: int, dice: torch.Generator) -> Tensors:
    return {"lora_up.weight": normal((out, 4), dice, 0.1), "lora_down.weight": normal((4, inner), dice, 0.1),
            "alpha": torch.tensor(2.0), "dora_scale": normal((1, inner), dice, 0.1) + 1.2}  # fmt: skip


def difference(out: int, inner: int, dice: torch.Generator) -> Tensors:
    return {"diff": normal((out, inner), dice, 0.03), "diff_b": normal((out,), dice, 0.2)}


def replaced(out: int, inner: int, dice: torch.Generator) -> Tensors:
    return {"set_weight": normal((out, inner), dice, 1 / math.sqrt(inner))}


def oft(out: int, inner: int, dice: torch.Generator) -> Tensors:
    return {"oft_blocks": normal((out // 8, 8, 8), dice, 0.1), "alpha": torch.tensor(1.0)}


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("kind", [loha, lokr, lokr_factored, dora, difference, replaced, oft])
@pytest.mark.parametrize("family", ["flux_dev", "wan_t2v"])
def test_every_kind_of_adapter_gives_ksamplers_latent(
    server: Server, kind: Callable[[int, int, torch.Generator], Tensors], family: str
) -> None:
    dice = torch.Generator().manual_seed(11)
    made = {f"diffusion_model.{place}.{name}": tensor for place, (out, inner) in sizes(server, family).items()
            for name, tensor in kind(out, inner, dice).items()}  # fmt: skip
    check(server, Job(family=family, cfg=2.0), [(write(server, f"{family}_{kind.__name__}", made), 0.9)])


@pytest.mark.parametrize(
    "names",
    [
        {"transformer.single_transformer_blocks.0.attn.to_q": (256, 256), "transformer.norm_out.linear": (512, 256)},
        {"lora_unet_single_blocks_0_linear1": (1792, 256), "lora_unet_double_blocks_0_img_mlp_0": (1024, 256)},
    ],
    ids=["diffusers", "kohya"],
)
def test_a_lora_in_other_names_gives_ksamplers_latent(server: Server, names: dict[str, tuple[int, int]]) -> None:
    dice = torch.Generator().manual_seed(12)
    made = {}
    for name, (out, inner) in names.items():
        up, down = ("lora_B", "lora_A") if name.startswith("transformer.") else ("lora_up", "lora_down")
        made |= {f"{name}.{up}.weight": normal((out, 4), dice), f"{name}.{down}.weight": normal((4, inner), dice)}
    check(server, FLUX, [(write(server, next(iter(names)), made), 1.0)])


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("node", "widgets"),
    [("ModelMergeSimple", {"ratio": 0.7}), ("ModelMergeSubtract", {"multiplier": 0.2}), ("ModelMergeAdd", {})],
)
def test_a_merged_model_gives_ksamplers_latent(server: Server, node: str, widgets: dict[str, Any]) -> None:
    lora_name = write(server, "flux_dev_4", lora(server, "flux_dev", 4))

    def merged(graph: Graph) -> Graph:
        graph["other"] = {
            "class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "flux_dev_full.safetensors"},
        }  # fmt: skip
        graph["other_lora"] = lora_node(["other", 0], lora_name, 0.6)
        inputs = {"model1": ["model", 0], "model2": ["other_lora", 0], **widgets}
        graph["merged"] = {"class_type": node, "inputs": inputs}
        graph["sampler"]["inputs"]["model"] = ["merged", 0]
        return graph

    want = latent_of(server.client.run(merged(sampling_graph(FLUX, "KSampler"))))
    got = latent_of(server.client.run(merged(sampling_graph(FLUX, "CPSampler", RING_2))))
    print(f"APART {node} {apart(got, want):.1e}")
    assert apart(got, want) <= BAR
    assert apart(got, sample(server, FLUX, [])) > 0.05


@pytest.mark.parametrize("degrees", ["ring_2", "ulysses_2"])
def test_a_hook_on_every_weight_is_there_in_every_step(server: Server, degrees: str) -> None:
    """ComfyUI takes an empty set of unhooked weights for all of them; the model sampling has buffers in it."""

    def sampled(sampler: Any, parallel: Parallel | None = None) -> Tensor:
        graph = sampling_graph(FLUX, sampler, parallel)
        graph["hook"] = node(
            "CreateHookModelAsLoraModelOnly", ckpt_name="flux_dev_full.safetensors", strength_model=0.5
        )
        return latent_of(server.client.run(with_hooks(graph, ["hook", 0])))

    want, got = sampled("KSampler"), sampled("CPSampler", DEGREES[degrees])
    assert apart(got, want) <= BAR
    assert apart(got, sample(server, FLUX, [])) > 0.02


def test_a_lora_that_makes_a_weight_larger_makes_it_larger_in_the_workers(server: Server) -> None:
    """As FLUX's control LoRAs do; without the LoRA the weight has its old size again."""
    wide = replace(FLUX, latent_seed=3)
    made = {
        "diffusion_model.img_in.lora_up.weight": 0.1 * torch.ones(256, 4),
        "diffusion_model.img_in.lora_down.weight": 0.1 * torch.ones(4, 128),
        "diffusion_model.img_in.reshape_weight": torch.tensor([256, 128]),
    }
    stack = [(write(server, "larger", made), 1.0)]

    def controlled(kind: Any, parallel: Parallel | None) -> Graph:
        graph = with_loras(sampling_graph(wide, kind, parallel), stack)
        graph["control"] = {
            "class_type": "CPTestOddCondition", "inputs": {"conditioning": ["positive", 0], "kind": "concat"}
        }  # fmt: skip
        graph["sampler"]["inputs"] |= {"positive": ["control", 0], "cfg": 1.0}
        return graph

    want = latent_of(server.client.run(controlled("KSampler", None)))
    assert apart(latent_of(server.client.run(controlled("CPSampler", RING_2))), want) <= BAR
    plain = latent_of(server.client.run(sampling_graph(FLUX, "KSampler")))
    assert apart(sample(server, FLUX, []), plain) <= BAR


def test_a_lora_beside_the_weights_is_refused_by_name(server: Server) -> None:
    graph = sampling_graph(FLUX, "CPSampler", RING_2)
    graph["lora"] = lora_node(["model", 0], write(server, "flux_dev_4", lora(server, "flux_dev", 4)), 1.0)
    graph["lora"]["class_type"] = "LoraLoaderBypassModelOnly"
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    with pytest.raises(NodeError, match="bypass_lora"):
        server.client.run(graph)


def check(server: Server, job: Job, stack: Stack, parallel: Parallel = RING_2) -> None:
    want = latent_of(server.client.run(with_loras(sampling_graph(job, "KSampler"), stack)))
    plain = latent_of(server.client.run(sampling_graph(job, "KSampler")))
    got = sample(server, job, stack, parallel)
    print(f"APART {job.family} {stack} {apart(got, want):.1e}, without: {apart(plain, want):.2f}")
    assert apart(got, want) <= BAR
    assert apart(plain, want) > 0.02, "the LoRA does something"


def sample(server: Server, job: Job, stack: Stack, parallel: Parallel = RING_2) -> Tensor:
    return latent_of(server.client.run(with_loras(sampling_graph(job, "CPSampler", parallel), stack)))


def lora(server: Server, family: str, rank: int) -> Tensors:
    dice = torch.Generator().manual_seed(rank)
    made = {}
    for place, (out, inner) in sizes(server, family).items():
        made[f"diffusion_model.{place}.lora_up.weight"] = normal((out, rank), dice)
        made[f"diffusion_model.{place}.lora_down.weight"] = normal((rank, inner), dice)
        made[f"diffusion_model.{place}.alpha"] = torch.tensor(rank / 2)
    return made


def sizes(server: Server, family: str) -> dict[str, tuple[int, int]]:
    with safe_open(server.base / "models" / "diffusion_models" / f"{family}.safetensors", "pt") as file:
        return {place: tuple(file.get_slice(f"{place}.weight").get_shape()) for place in PLACES[family]}


def write(server: Server, name: str, tensors: Tensors) -> str:
    """ComfyUI remembers a LoRA by its file name: a name has the same tensors in every test."""
    save_file(tensors, server.base / "models" / "loras" / f"{name}.safetensors")
    return f"{name}.safetensors"


def normal(shape: tuple[int, ...], dice: torch.Generator, std: float = 0.15) -> Tensor:
    return torch.randn(*shape, generator=dice) * std
