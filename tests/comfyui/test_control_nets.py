"""ControlNets of every class of ComfyUI's, by its own nodes: the workers load and run them, in ComfyUI's own loop."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ..zoo.networks import POOLED_SD3
from ..zoo.unets import POOLED, TEXT
from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_foreign import WINDOWS
from .test_kin import link, node
from .test_weights import MODES, kept_weights

BAR = 1e-5  # of the latent's standard deviation
STAYS = "runs in ComfyUI's process"
JOB = Job(family="flux_dev", cfg=4.0, steps=5, batch=2, latent_seed=4)
ONE = Parallel(ring_degree=1, ulysses_degree=1)
PROMPTS, IMAGES = Parallel(cfg_degree=2), Parallel(data_degree=2, cfg_degree=1)
RING, ULYSSES = DEGREES["ring_2"], DEGREES["ulysses_2"]


@dataclass(frozen=True, kw_only=True)
class Apply:
    """One Apply node: the `file`, and its widgets."""

    file: str
    kind: str = "ControlNetApplyAdvanced"
    pictures: str = "1,128,192,3"
    strength: float = 0.7
    percents: tuple[float, float] = (0.1, 0.8)
    union: str = ""
    vae: str = ""
    masked: bool = False


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A network, by its file, with its kind of text and latent, and the ControlNets on it, chained in their order."""

    network: str
    chain: tuple[Apply, ...]
    text: dict[str, Any]
    channels: int = 16
    frames: tuple[int, ...] = ()
    weight_dtype: str = "default"
    merged: bool = False  # weight patches make all weights of the network smaller
    job: Job = field(default_factory=lambda: JOB)

    def on(self, **changes: Any) -> Scene:
        return replace(self, job=replace(self.job, **changes))

    def graph(self, parallel: Parallel | None) -> Graph:
        graph = sampling_graph(self.job, "CPSampler" if parallel else "KSampler", parallel)
        graph["model"]["inputs"] |= {"unet_name": f"{self.network}.safetensors", "weight_dtype": self.weight_dtype}
        if self.merged:
            graph["merged"] = node("ModelMergeSubtract", model1=link("model"), model2=link("model"), multiplier=0.1)
            graph["sampler"]["inputs"]["model"] = link("merged")
        shape = (self.job.batch, self.channels, *self.frames, *self.job.size)
        graph["latent"]["inputs"]["shape"] = ",".join(map(str, shape))
        for text, tokens in ("positive", 20), ("negative", 31):
            graph[text]["inputs"]["spec"] = json.dumps({"tokens": tokens, **self.text})
        for number, apply in enumerate(self.chain):
            applied(graph, apply, number)
        return graph


def applied(graph: Graph, apply: Apply, number: int) -> None:
    inputs, name = graph["sampler"]["inputs"], f"control_{number}"
    graph[f"{name}_net"] = node("ControlNetLoader", control_net_name=apply.file)
    graph[f"{name}_picture"] = node("CPTestPictures", shape=apply.pictures, seed=number + 6, nonce=0)
    net = link(f"{name}_net")
    if apply.union:
        graph[f"{name}_union"] = node("SetUnionControlNetType", control_net=net, type=apply.union)
        net = link(f"{name}_union")
    given: dict[str, Any] = {"control_net": net, "image": link(f"{name}_picture"), "strength": apply.strength}
    if apply.vae:
        graph[f"{name}_vae"] = node("VAELoader", vae_name=apply.vae)
        given["vae"] = link(f"{name}_vae")
    if apply.masked:
        graph[f"{name}_solid"] = node("SolidMask", value=1.0, width=192, height=128)
        feathers = {"left": 90, "top": 0, "right": 0, "bottom": 40}
        graph[f"{name}_mask"] = node("FeatherMask", mask=link(f"{name}_solid"), **feathers)
        given["mask"] = link(f"{name}_mask")
    if apply.kind == "ControlNetApply":
        graph[name] = node(apply.kind, conditioning=inputs["positive"], **given)
        inputs["positive"] = link(name)
        return
    start, end = apply.percents
    prompts = {"positive": inputs["positive"], "negative": inputs["negative"]}
    graph[name] = node(apply.kind, **prompts, **given, start_percent=start, end_percent=end)
    inputs["positive"], inputs["negative"] = link(name), link(name, 1)


OTHER_SIZE = "2,168,200,3"  # a picture for each image
FLUX, SD3, QWEN = {"dim": 128, "pooled": 64, "guidance": 3.5}, {"dim": 96, "pooled": POOLED_SD3}, {"dim": 96}


def unet(kind: str, *chain: Apply) -> Scene:
    text = {"dim": TEXT, **({"pooled": POOLED} if kind == "sdxl" else {})}
    return Scene(network=f"control/{kind}", chain=chain, text=text, channels=4)


def two(kind: str, second: str = "pickled.pth") -> Scene:
    return unet(kind, Apply(file=f"{kind}_plain.safetensors"), Apply(file=f"{kind}_{second}", pictures=OTHER_SIZE))


UNION = Apply(file="flux_union.safetensors", union="depth", vae="taef1", pictures=OTHER_SIZE)
LORA = Apply(file="sdxl_lora.safetensors", pictures=OTHER_SIZE)
CANNY = Apply(file="sd35_canny.safetensors", kind="ControlNetApplySD3", vae="taef1")
INPAINT = Apply(file="flux_inpaint.safetensors", kind="ControlNetInpaintingAliMamaApply", vae="taef1", masked=True)
SCENES = {
    "SD1.5": two("sd15"),
    "SDXL": two("sdxl"),
    "SD1.5 with a T2I adapter before": unet("sd15", Apply(file="sd15_t2i.safetensors", pictures=OTHER_SIZE),
                                            Apply(file="sd15_plain.safetensors")),
    "Control-LoRA": unet("sdxl", LORA),
    "Control-LoRA on an fp8 network": replace(unet("sdxl", LORA), weight_dtype="fp8_e4m3fn"),
    "Control-LoRA on a merged network": replace(unet("sdxl", LORA), merged=True),
    "SDXL union": Scene(network="control/sdxl_wide", channels=4, text={"dim": TEXT, "pooled": POOLED},
                        chain=(Apply(file="sdxl_union.safetensors", union="depth", pictures=OTHER_SIZE),)),
    "SD1.5 with means over the picture": two("sd15", "shuffle.safetensors"),
    "Apply, old": unet("sd15", Apply(file="sd15_other.safetensors", kind="ControlNetApply")),
    "fp16 file": unet("sdxl", Apply(file="sdxl_half.safetensors")),
    "fp8 file": unet("sd15", Apply(file="sd15_float8.safetensors")),
    "FLUX": Scene(network="flux_dev", chain=(Apply(file="flux_xlabs.safetensors"), UNION), text=FLUX),
    "FLUX inpainting": Scene(network="flux_dev", chain=(INPAINT,), text=FLUX),
    "SD3.5": Scene(network="control/sd35", text=SD3, chain=(CANNY, replace(CANNY, pictures=OTHER_SIZE, strength=0.4))),
    "Qwen-Image": Scene(network="qwen_image", text=QWEN, frames=(1,), chain=(
        Apply(file="qwen_union.safetensors", vae="wan.safetensors"),
        Apply(file="qwen_union.safetensors", vae="wan.safetensors", pictures=OTHER_SIZE, strength=0.4))),
    "Qwen-Image Fun": Scene(network="qwen_image", text=QWEN, frames=(1,), chain=(
        Apply(file="qwen_fun.safetensors", vae="wan.safetensors"),)),
}  # fmt: skip
BY_NAME = {"prompts": PROMPTS, "images": IMAGES, "ring": RING, "ulysses": ULYSSES}
DIVIDED = [(what, degrees) for what in SCENES for degrees in BY_NAME]


@pytest.fixture(scope="module")
def server_of_nets(shared_server: Server) -> Server:
    """The session's, with tiny ControlNets and their networks."""
    shared_server.write_tiny()
    return shared_server


@pytest.fixture
def server(server_of_nets: Server, vaes: Server) -> Server:
    return vaes


@pytest.fixture(scope="module")
def native(server_of_nets: Server) -> Callable[[Scene], Tensor]:
    """KSampler's latent, sampled once."""
    by_graph: dict[str, Scene] = {}
    sampled = functools.cache(lambda key: latent_of(server_of_nets.client.run(by_graph[key].graph(None))))

    def latent(scene: Scene) -> Tensor:
        by_graph[repr(scene)] = scene
        return sampled(repr(scene))

    return latent


def check(
    server: Server, native: Callable[[Scene], Tensor], scene: Scene, parallel: Parallel, *, bar: float = BAR
) -> None:
    want, since = native(scene), server.log_size()
    got = latent_of(server.client.run(scene.graph(parallel)))
    print(f"APART {apart(got, want):.1e}")
    assert apart(got, want) <= bar
    assert STAYS not in server.log(since)


@pytest.mark.parametrize("what", SCENES)
@pytest.mark.sweep
def test_it_does_something(server: Server, native: Callable[[Scene], Tensor], what: str) -> None:
    scene = SCENES[what]
    assert apart(native(scene), native(replace(scene, chain=scene.chain[:-1]))) > 1e-3


@pytest.mark.parametrize("what", SCENES)
@pytest.mark.sweep(one_in=4)
def test_on_one_worker_it_is_ksamplers_to_the_bit(server: Server, native: Callable[[Scene], Tensor], what: str) -> None:
    check(server, native, SCENES[what], ONE, bar=0.0)


@pytest.mark.sweep(one_in=13)
@pytest.mark.parametrize(("what", "degrees"), DIVIDED)
def test_two_workers_give_ksamplers_latent(
    server: Server, native: Callable[[Scene], Tensor], what: str, degrees: str
) -> None:
    check(server, native, SCENES[what], BY_NAME[degrees])


def test_a_later_run_has_nothing_of_an_earlier_one(server: Server, native: Callable[[Scene], Tensor]) -> None:
    """Other strengths, pictures, an order, another network, and prompts on workers that had images before."""
    scene = SCENES["SDXL"]
    first, second = scene.chain
    weaker = replace(scene, chain=(replace(first, strength=0.3), second))
    wider = replace(scene, chain=(replace(first, pictures="1,64,80,3", percents=(0.0, 1.0)), second))
    turned = replace(scene, chain=(second, first))
    odd = replace(scene.on(size=(18, 26), batch=1), chain=(first,))
    one = replace(scene, chain=(second,))
    for each in scene, weaker, wider, SCENES["FLUX"], turned, odd, one:
        check(server, native, each, IMAGES)
    for each in scene, replace(scene, chain=()), scene:
        check(server, native, each, PROMPTS)


@pytest.mark.sweep
@pytest.mark.parametrize("degrees", ["ring_3", "ring_2_x_ulysses_2", "ring and prompts"])
@pytest.mark.parametrize("what", ["SDXL", "SD1.5 with a T2I adapter before", "FLUX", "SD3.5"])
def test_more_workers_and_an_odd_size_do(
    server: Server, native: Callable[[Scene], Tensor], what: str, degrees: str
) -> None:
    parallel = DEGREES.get(degrees) or replace(RING, cfg_degree=2)
    check(server, native, SCENES[what].on(size=(18, 26)), parallel)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("degrees", ["images", "ring", "ulysses"])
@pytest.mark.parametrize("what", ["SD1.5", "SDXL", "FLUX", "SD3.5", "Qwen-Image"])
def test_a_single_prompt_of_an_odd_size_does(
    server: Server, native: Callable[[Scene], Tensor], what: str, degrees: str
) -> None:
    check(server, native, SCENES[what].on(size=(18, 26), cfg=1.0), BY_NAME[degrees])


@pytest.mark.sweep
def test_stages_divide_them_too(server: Server, native: Callable[[Scene], Tensor]) -> None:
    check(server, native, SCENES["FLUX"], replace(ULYSSES, pipeline_degree=2))


@pytest.mark.parametrize("what", ["SDXL", "FLUX"])
@pytest.mark.sweep(one_in=2)
def test_what_was_divided_is_whole_in_the_next_run(
    server: Server, native: Callable[[Scene], Tensor], what: str
) -> None:
    for parallel in RING, PROMPTS, ULYSSES, IMAGES:
        check(server, native, SCENES[what], parallel)


def test_the_log_says_which_of_them_runs_undivided(server: Server, native: Callable[[Scene], Tensor]) -> None:
    check(server, native, SCENES["SD1.5 with means over the picture"], RING)
    assert "runs undivided on each rank: it takes means over the whole picture" in server.log()


def stays(server: Server, graph: Graph, want: Tensor, why: str) -> None:
    """The loop stays in ComfyUI's process, the log says why, and it is KSampler's latent."""
    since = server.log_size()
    assert apart(latent_of(server.client.run(graph)), want) <= BAR
    (line,) = [line for line in server.log(since).splitlines() if STAYS in line]
    assert why in line


def test_a_difference_file_stays_in_comfyuis_loop(server: Server) -> None:
    def graph(parallel: Parallel | None) -> Graph:
        made = unet("sdxl", Apply(file="sdxl_difference.pth")).graph(parallel)
        made["control_0_net"] = node(
            "DiffControlNetLoader", model=link("model"), control_net_name="sdxl_difference.pth"
        )
        return made

    want = latent_of(server.client.run(graph(None)))
    stays(server, graph(PROMPTS), want, "has not read from a file")


def in_an_area(graph: Graph, _: Scene) -> Graph:
    area = {"height": 64, "width": 80, "x": 16, "y": 16, "strength": 0.8}
    graph["area"] = node("ConditioningSetArea", conditioning=graph["sampler"]["inputs"]["positive"], **area)
    graph["sampler"]["inputs"]["positive"] = link("area")
    return graph


def in_windows(graph: Graph, scene: Scene) -> Graph:
    """Windows of ten rows of the latent."""
    rows = {"context_length": 10, "context_overlap": 4, "dim": 2 + len(scene.frames), "causal_window_fix": False}
    graph["windows"] = node("ContextWindowsManual", model=link("model"), **{**WINDOWS, **rows})
    graph["sampler"]["inputs"]["model"] = link("windows")
    return graph


PARTS = {"an area": in_an_area, "context windows": in_windows}
OF_PARTS = [
    *((what, part) for what in ("FLUX", "SD3.5", "SDXL") for part in PARTS),
    *((what, "context windows") for what in ("FLUX inpainting", "Qwen-Image", "Qwen-Image Fun")),
]


@pytest.mark.parametrize("degrees", ["1 worker", *BY_NAME, "ring_3"])
@pytest.mark.parametrize(("what", "part"), OF_PARTS)
@pytest.mark.sweep(one_in=12)
def test_a_picture_for_a_part_of_the_latent_is_encoded_in_the_workers(
    server: Server, what: str, part: str, degrees: str
) -> None:
    scene, parallel = SCENES[what].on(size=(18, 26), batch=1), {**DEGREES, **BY_NAME, "1 worker": ONE}[degrees]
    latents, since = [], server.log_size()
    for each in None, parallel:
        latents.append(latent_of(server.client.run(PARTS[part](scene.graph(each), scene))))
    print(f"APART {what} {part} {degrees} {apart(latents[1], latents[0]):.1e}")
    assert apart(latents[1], latents[0]) <= BAR
    assert STAYS not in server.log(since)


def test_the_vae_of_a_cp_vae_encodes_in_each_worker(server: Server, native: Callable[[Scene], Tensor]) -> None:
    scene, since = SCENES["FLUX inpainting"], server.log_size()
    graph = scene.graph(RING)
    graph["divided"] = node("CPVAE", vae=link("control_0_vae"))
    graph["control_0"]["inputs"]["vae"] = link("divided")
    assert apart(latent_of(server.client.run(graph)), native(scene)) <= BAR
    assert STAYS not in server.log(since)
    assert "VAE encoded" not in server.log(since)


def test_patches_are_refused_with_them(server: Server) -> None:
    graph = SCENES["FLUX"].on(steps=8).graph(Parallel(pipeline_degree=2, patches=2))
    with pytest.raises(NodeError, match=r"patches 2 cannot go with .*ControlNets.*set patches to 1"):
        server.client.run(graph)


@pytest.mark.parametrize(
    "parallel",
    [Parallel(pipeline_degree=2), replace(RING, weights="shard"), replace(ULYSSES, step_cache=1e-9)],
    ids=["stages", "weights in parts", "a step cache that skips nothing"],
)
@pytest.mark.parametrize("what", ["FLUX", "SD3.5", "Qwen-Image Fun"])
@pytest.mark.sweep(one_in=3)
def test_with_stages_weights_elsewhere_and_a_step_cache(
    server: Server, native: Callable[[Scene], Tensor], what: str, parallel: Parallel
) -> None:
    check(server, native, SCENES[what], parallel)


def test_cp_plan_counts_their_weights_and_says_why_the_loop_stays(server: Server) -> None:
    def report(scene: Scene, loader: str = "ControlNetLoader") -> str:
        graph = scene.graph(PROMPTS)
        if loader != "ControlNetLoader":
            graph["control_0_net"] = node(loader, model=link("model"), control_net_name=scene.chain[0].file)
        wants = {"model": link("model"), "positive": graph["sampler"]["inputs"]["positive"]}
        graph["plan"] = node("CPPlan", **wants, latent_image=link("latent"), cp_config=link("config"), cfg=4.0)
        del graph["sampler"], graph["save"]
        (text,) = server.client.run(graph).outputs["plan"]["text"]
        return text

    assert "ControlNets: in the workers: 2, with 0.0" in report(SCENES["FLUX"])
    assert "ControlNets" not in report(replace(SCENES["FLUX"], chain=()))
    text = report(unet("sdxl", Apply(file="sdxl_difference.pth")), "DiffControlNetLoader")
    assert "Loop: stays in ComfyUI's process" in text
    assert "has not read from a file" in text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sweep(one_in=2)
def test_a_control_lora_which_is_made_of_the_networks_weights_has_all_of_them(server: Server, mode: str) -> None:
    scene = SCENES["Control-LoRA"]
    want = latent_of(server.client.run(scene.graph(RING)))
    got = latent_of(server.client.run(scene.graph(replace(RING, weights=mode))))
    assert torch.equal(got, want)
    assert min(share for share, _ in kept_weights(server)) == 1
