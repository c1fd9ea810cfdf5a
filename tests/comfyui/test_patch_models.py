"""Model patches that bring a network of their own (DiffSynth, Fun ControlNets, USO): the workers load and run it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from ..zoo import checkpoints
from .cases import ALONE, DEGREES, FOUR
from .client import Graph, NodeError
from .graphs import Job, Parallel, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_kin import link, node, on_the_loader
from .test_lora import write

BARS = {
    "1_worker": 0.0,
    "ring_2": 1e-5,
    "ulysses_2": 1e-5,
    "ring_3": 1e-5,
    "ring_2_x_ulysses_2": 1e-5,
    "pipeline_2": 1e-5,
}
READ_IN_PLACE = 2e-6  # of FLUX in float32: workers have its weights where the file has them, at another alignment
QWEN = Job(family="qwen_image", cfg=2.0, steps=3, latent_seed=4)
FLUX = Job(family="flux_dev", cfg=2.0, steps=3, latent_seed=4)
WAN = Job(family="wan_t2v", cfg=2.0, steps=3, latent_seed=4)
HINT = "1,128,192,3"  # pixels of the jobs' latents
LORAS = {"qwen_image": ("transformer_blocks.0.attn.to_q", 128), "flux_dev": ("double_blocks.0.img_attn.proj", 256),
         "z_image": ("layers.2.attention.out", 288)}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A node that puts the `file` on MODEL, with what it reads, sampled by `job`."""

    node: str
    file: str
    job: Job
    inputs: dict[str, Any] = field(default_factory=dict)
    also: Graph = field(default_factory=dict)
    instead: str = ""  # of the job's network: text of this `dim` goes with it, and this `shape` of latent
    dim: int = 96
    shape: str = ""

    @property
    def family(self) -> str:
        return self.instead or self.job.family


def vae(name: str) -> Graph:
    return {"vae": node("VAELoader", vae_name=name)}


def picture(shape: str = HINT, seed: int = 6) -> dict[str, Any]:
    return node("CPTestPictures", shape=shape, seed=seed, nonce=0)


def masked(height: int = 128, width: int = 192) -> Graph:
    feathers = {"left": 90, "top": 0, "right": 0, "bottom": 40}
    return {
        "solid": node("SolidMask", value=1.0, width=width, height=height),
        "mask": node("FeatherMask", mask=link("solid"), **feathers),
    }


def qwen(file: str, hint: str = HINT, strength: float = 0.8, job: Job = QWEN, mask: bool = False) -> Patch:
    inputs = {"vae": link("vae"), "image": link("hint"), "strength": strength}
    return Patch(
        node="QwenImageDiffsynthControlnet", file=file, job=job,
        inputs=inputs | ({"mask": link("mask")} if mask else {}),
        also={**vae("wan.safetensors"), "hint": picture(hint), **(masked() if mask else {})},
    )  # fmt: skip


def fun(file: str, hint: str = HINT, inpaint: str = "", mask: bool = False, job: Job = FLUX) -> Patch:
    inputs: Graph = {"vae": link("vae"), "strength": 0.7}  # type: ignore[dict-item]
    also = vae("taef1") | (masked() if mask else {})
    for name, shape in ("image", hint), ("inpaint_image", inpaint):
        if shape:
            also[name], inputs[name] = picture(shape, seed=len(name)), link(name)  # type: ignore[assignment]
    return Patch(
        node="ZImageFunControlnet", file=file, job=job, instead="z_image",
        inputs=inputs | ({"mask": link("mask")} if mask else {}), also=also,
    )  # fmt: skip


PATCHES = {
    "canny": qwen("qwen_canny"),
    "depth": qwen("qwen_depth"),
    "inpaint": qwen("qwen_inpaint", mask=True),
    "canny of another size": qwen("qwen_canny", hint="1,90,100,3"),
    "canny at an odd size": qwen("qwen_canny", job=replace(QWEN, size=(17, 23))),
    "canny on two pictures": qwen("qwen_canny", job=replace(QWEN, batch=2)),
    "Fun": fun("z_image_fun"),
    "Fun lite": fun("z_image_fun_lite"),
    "Fun lite, inpainting": fun("z_image_fun_lite", hint="", inpaint=HINT, mask=True),
    "Fun lite of two sizes": fun("z_image_fun_lite", hint="1,90,100,3", inpaint=HINT, mask=True),
    "Fun at an odd size": fun("z_image_fun", job=replace(FLUX, size=(17, 23))),
    "USO": Patch(
        node="USOStyleReference", file="uso_style", job=replace(FLUX, cfg=1.0),
        inputs={"clip_vision_output": link("seen")},
        also={"seen": node("CPTestSeen", tokens=12, width=48)},
    ),
    "Uni3C": Patch(
        node="WanUni3CControlnetApply", file="uni3c", job=WAN,
        inputs={"vae": link("vae"), "render_video": link("hint"), "strength": 0.8, "start_percent": 0.0,
                "end_percent": 0.6},
        also={**vae("wan.safetensors"), "hint": picture("9,128,192,3")},
    ),
    "Anima LLLite": Patch(
        node="AnimaLLLiteApply", file="anima_lllite", job=QWEN, instead="anima", dim=1024, shape="1,16,1,17,23",
        inputs={"image": link("hint"), "strength": 0.9, "start_percent": 0.0, "end_percent": 1.0},
        also={"hint": picture()},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server_of_patches(shared_server: Server) -> Server:
    """The session's, with tiny patches and a Z-Image of as many blocks as they go by."""
    written = checkpoints.write(shared_server.base / "models" / "diffusion_models", "z_image", layers=30)
    written.rename(written.with_name("z_image.safetensors"))
    shared_server.write_tiny()
    return shared_server


@pytest.fixture
def server(server_of_patches: Server, vaes: Server) -> Server:
    return vaes


def sampled(what: str, parallel: Parallel | None = None, *, lora: str = "", fp8: bool = False) -> Graph:
    patch = PATCHES[what]
    graph = sampling_graph(patch.job, "CPSampler" if parallel else "KSampler", parallel) | patch.also
    if patch.instead:
        graph["model"]["inputs"]["unet_name"] = f"{patch.instead}.safetensors"
        for text in "positive", "negative":
            graph[text]["inputs"]["spec"] = json.dumps({"tokens": 7, "dim": patch.dim})
    if patch.shape:
        graph["latent"]["inputs"]["shape"] = patch.shape
    if fp8:
        graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    if lora:
        with_loras(graph, [(lora, 0.9)])
    return patched(graph, patch, fp8=fp8)


def patched(graph: Graph, patch: Patch, *, fp8: bool = False) -> Graph:
    graph["patch"] = node("ModelPatchLoader", name=f"{patch.file}{'_fp8' * fp8}.safetensors")
    model = graph["sampler"]["inputs"]["model"]
    graph["patched"] = node(patch.node, model=model, model_patch=link("patch"), **patch.inputs)
    graph["sampler"]["inputs"]["model"] = link("patched")
    return graph


def lora_for(server: Server, family: str) -> str:
    import torch

    place, width = LORAS[family]
    dice = torch.Generator().manual_seed(5)
    up, down = (torch.randn(width, width, generator=dice)[:, :4] * 0.2 for _ in range(2))
    key = f"diffusion_model.{place}"
    tensors = {f"{key}.lora_up.weight": up.contiguous(), f"{key}.lora_down.weight": down.T.contiguous()}
    return write(server, f"patched_{family}", tensors)


@pytest.fixture(scope="module")
def native(server_of_patches: Server) -> Callable[..., Tensor]:
    """KSampler's latent, sampled once."""
    return functools.cache(lambda what, **how: latent_of(server_of_patches.client.run(sampled(what, **how))))


def check(server: Server, native: Callable[..., Tensor], what: str, degrees: str, **how: Any) -> None:
    want = native(what, **how)
    got = latent_of(server.client.run(sampled(what, DEGREES[degrees], **how)))
    print(f"APART {what} {how} {degrees} {apart(got, want):.1e}")
    assert apart(got, want) <= max(BARS[degrees], READ_IN_PLACE if PATCHES[what].family == "flux_dev" else 0)


@pytest.mark.sweep(one_in=12)
@pytest.mark.parametrize("what", PATCHES)
@pytest.mark.parametrize("degrees", [ALONE, "ulysses_2", "ring_2", "ring_3", FOUR])
def test_it_gives_ksamplers_latent(server: Server, native: Callable[..., Tensor], degrees: str, what: str) -> None:
    check(server, native, what, degrees)


@pytest.mark.sweep(one_in=18)
@pytest.mark.parametrize("what", ["canny", "Fun lite", "USO"])
@pytest.mark.parametrize("degrees", ["ulysses_2", "ring_2", ALONE])
@pytest.mark.parametrize("how", ["lora", "fp8"])
def test_with_a_lora_or_in_fp8_too(
    server: Server, native: Callable[..., Tensor], how: str, degrees: str, what: str
) -> None:
    changed = {"fp8": True} if how == "fp8" else {"lora": lora_for(server, PATCHES[what].family)}
    check(server, native, what, degrees, **changed)


@pytest.mark.parametrize("what", ["canny", "Fun lite", "USO", "Anima LLLite"])
@pytest.mark.sweep(one_in=4)
def test_it_does_something(server: Server, native: Callable[..., Tensor], what: str) -> None:
    graph = sampled(what)
    graph["sampler"]["inputs"]["model"] = link("model")
    assert apart(latent_of(server.client.run(graph)), native(what)) > 1e-2


@pytest.mark.parametrize("degrees", ["1_worker"])
def test_on_one_worker_it_is_ksamplers_to_the_bit(server: Server, native: Callable[..., Tensor], degrees: str) -> None:
    check(server, native, "canny", degrees)


def test_workers_read_its_file_once(server: Server, native: Callable[..., Tensor]) -> None:
    """Another file that looks the same, name, size and time, takes its place after the first run."""
    check(server, native, "depth", "ulysses_2")
    path = server.base / "models" / "model_patches" / "qwen_depth.safetensors"
    status = path.stat()
    kept = path.rename(path.with_name("kept"))
    path.write_bytes(path.with_name("qwen_canny.safetensors").read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        check(server, native, "depth", "ulysses_2")
    finally:
        kept.replace(path)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("what", ["canny of another size", "Fun at an odd size", "USO"])
def test_a_native_sampler_on_cp_load_diffusion_model_has_it_too(
    server: Server, native: Callable[..., Tensor], what: str
) -> None:
    graph = sampled(what)
    loaded = on_the_loader(graph, PATCHES[what].job, DEGREES["ulysses_2"])
    loaded["model"]["inputs"]["unet_name"] = f"{PATCHES[what].family}.safetensors"
    assert apart(latent_of(server.client.run(loaded)), native(what)) <= BARS["ulysses_2"]


def test_in_the_stages_of_a_pipeline_each_has_the_patches_of_its_blocks(
    server: Server, native: Callable[..., Tensor]
) -> None:
    """But for one that goes on from what it made at earlier blocks."""
    check(server, native, "canny", "pipeline_2")
    with pytest.raises(NodeError, match=r"Fun ControlNet continues from .*set pipeline_degree to 1"):
        server.client.run(sampled("Fun lite", DEGREES["pipeline_2"]))


@pytest.mark.parametrize("name", ["qwen_pickled.pt", "qwen_old.pt"])
def test_a_pickled_file_is_known_too_also_one_in_torchs_old_format(server: Server, name: str) -> None:
    latents = []
    for parallel in None, DEGREES["ulysses_2"]:
        graph = sampled("canny", parallel)
        graph["patch"]["inputs"]["name"] = name
        latents.append(latent_of(server.client.run(graph)))
    assert apart(latents[1], latents[0]) <= BARS["ulysses_2"]


@pytest.mark.parametrize("degrees", [ALONE, "ulysses_2", "ring_2", "ring_3"])
@pytest.mark.parametrize("what", ["canny", "inpaint", "Fun lite", "Fun lite of two sizes"])
@pytest.mark.sweep(one_in=4)
def test_a_patch_encodes_its_picture_for_an_area_of_another_size(server: Server, what: str, degrees: str) -> None:
    latents = []
    for parallel in None, DEGREES[degrees]:
        graph = sampled(what, parallel)
        area = {"height": 64, "width": 80, "x": 16, "y": 16, "strength": 0.8}
        graph["area"] = node("ConditioningSetArea", conditioning=link("positive"), **area)
        graph["sampler"]["inputs"]["positive"] = link("area")
        latents.append(latent_of(server.client.run(graph)))
    print(f"APART {what} {degrees} {apart(latents[1], latents[0]):.1e}")
    assert apart(latents[1], latents[0]) <= 1e-5


@pytest.mark.parametrize("degrees", ["ring_2"])
def test_workers_encode_its_picture_where_the_loop_stays_in_comfyui_too(
    server: Server, native: Callable[..., Tensor], degrees: str
) -> None:
    what, since = "Fun lite of two sizes", server.log_size()
    graph = sampled(what, DEGREES[degrees])
    graph["control"] = node("CPTestControl", conditioning=link("positive"))  # which this network does not read
    graph["sampler"]["inputs"]["positive"] = link("control")
    assert apart(latent_of(server.client.run(graph)), native(what)) <= BARS[degrees]
    assert "runs in ComfyUI's process" in server.log(since)
