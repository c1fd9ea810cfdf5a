"""Packs that are merely installed, and replace ComfyUI's and torch's code: a run gives KSampler's picture, in the
workers where these have the same code replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from .client import Graph, NodeError
from .comfy import ComfyInstall
from .graphs import Parallel, with_hooks
from .latents import apart, latent_of
from .nodes_benches import benches, write_benches
from .nodes_graphs import Trial
from .server import Server, running_server
from .test_foreign import BAR, FLUX, WAN, Picture, on_the_model, plain, with_the_sampler
from .test_kin import link, node
from .test_packs import AUTO, SPLIT, code_on_a_unet, unchanged
from .test_unet_nodes import ODD

RIG = Path(__file__).absolute().parent / "rig_replacing"
INSIDE = RIG.with_name("rig_inside")
MENDED = """
import os, sys
import comfy.options
if "RANK" not in os.environ:
    sys.path.append(os.path.dirname(comfy.options.__file__))
elif os.path.exists(os.path.join(os.path.dirname(__file__), "broken")):
    raise RuntimeError("not mended")
import ldm.common_dit
class Darker:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "cp test"
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}
    def patch(self, model):
        patched = model.clone()
        patched.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.9)
        return (patched,)
NODE_CLASS_MAPPINGS = {"CPTest cp_mended": Darker}
"""


@pytest.fixture(scope="module")
def replacing(comfy: ComfyInstall, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two packs that replace code as they are imported, and one that no worker can import at first."""
    folder = tmp_path_factory.mktemp("packs")
    packs = folder / "cp_replacing", folder / "cp_otherwise"
    for pack in packs:
        pack.symlink_to(RIG)
    mended = folder / "cp_mended"
    mended.mkdir()
    (mended / "__init__.py").write_text(MENDED, encoding="utf-8")
    (mended / "broken").touch()
    with running_server(comfy, packs=(*packs, mended)) as server:
        yield server


@pytest.fixture(scope="module")
def inside(comfy: ComfyInstall, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a pack that replaces code inside networks as it is imported."""
    pack = tmp_path_factory.mktemp("packs") / "cp_inside"
    pack.symlink_to(INSIDE)
    with running_server(comfy, packs=(pack,)) as server:
        yield server


def check(server: Server, picture: Picture, parallel: Parallel = SPLIT) -> str:
    """Compares with ComfyUI's own sampler; returns what ComfyUI has logged of the run of ours."""
    want, since = latent_of(server.client.run(picture(None))), server.log_size()
    got = latent_of(server.client.run(picture(parallel)))
    print(f"APART {apart(got, want):.1e}")
    assert apart(got, want) <= BAR
    return server.log(since)


def on_a_unet(server: Server) -> Picture:
    write_benches(server, {"unet"})
    info, bench = server.client.get("/object_info"), replace(benches()["unet"], latent=ODD)
    trial = Trial(node="ModelSamplingDiscrete", bench=bench)
    return lambda parallel: trial.graph(info, parallel)


def test_a_loop_whose_code_the_workers_have_replaced_too_runs_there_and_is_split(replacing: Server) -> None:
    log = check(replacing, unchanged)
    assert "on 2 worker(s): sampled in" in log
    assert "runs in ComfyUI's process" not in log
    assert replacing.client.get("/cp/status")["degrees"]["ulysses_degree"] == 2


def test_an_object_of_a_pack_goes_to_the_workers_with_the_code_of_comfyuis_that_the_pack_has_replaced(
    replacing: Server,
) -> None:
    """A native run has left noise levels in that object, which workers do not have."""
    since = replacing.log_size()
    for steps in (3, 4):
        check(replacing, partial(plain, replace(FLUX, steps=steps)))
    assert "runs in ComfyUI's process" not in replacing.log(since)


def test_code_that_packs_put_in_place_of_comfyuis_loop_reads_the_global_variables_that_a_node_has_set(
    replacing: Server,
) -> None:
    """Each of its settings reaches the workers."""
    for what in ("gain", "nothing"):
        assert "on 2 worker(s): sampled in" in check(replacing, on_the_model("CPTest cp_replacing", what=what))


def test_a_network_whose_code_is_replaced_is_sampled_by_comfyui_by_name_where_it_was_to_be_split(
    replacing: Server,
) -> None:
    """Who merely has such a pack is not refused every run."""
    log = check(replacing, on_a_unet(replacing))
    assert "another pack has replaced torch.nn.modules.normalization.GroupNorm.forward" in log
    assert "would split it; set them to 0" in log
    assert "worker(s): sampled in" not in log
    assert "worker(s): sampled in" in check(replacing, on_a_unet(replacing), AUTO)


def test_code_inside_a_network_that_a_node_replaces_in_comfyuis_process_alone_is_sampled_there_by_name(
    inside: Server,
) -> None:
    """Workers have ComfyUI's, until the node has put it back."""
    for attempt in ("on the workers first", "here at once"):
        try:
            log = check(inside, replaced_inside(inside, "layer norm", "Wan"), AUTO)
        finally:
            inside.client.run(replaced_inside(inside, "nothing", "Wan")(None))
        assert "cp_inside has not replaced torch.nn.modules.normalization.LayerNorm.forward alike" in log, attempt
        assert log.count("runs this MODEL in ComfyUI's process") == 1, attempt
    assert "worker(s): sampled in" in check(inside, replaced_inside(inside, "nothing", "Wan"), AUTO)


PROMPTS = Parallel(devices="cpu,cpu", cfg_degree=2)


def replaced_inside(server: Server, kind: str, network: str) -> Picture:
    if network == "SDXL":
        return code_on_a_unet(server, kind, "CPTest cp_inside")
    return on_the_model("CPTest cp_inside", job=WAN if network == "Wan" else FLUX, kind=kind)


def test_cp_plan_names_the_code_that_keeps_a_network_undivided_or_in_comfyui(inside: Server) -> None:
    for parallel, says in ((AUTO, "with"), (SPLIT, "would split it; set them to 0")):
        graph = unchanged(parallel)
        del graph["save"]
        sampler = graph.pop("sampler")["inputs"]
        sockets = {name: sampler[name] for name in ("model", "latent_image", "positive", "cp_config")}
        graph["plan"] = node("CPPlan", **sockets, cfg=2.0)
        (text,) = inside.client.run(graph).outputs["plan"]["text"]
        assert says in text
        assert "by cp_inside" in text or "(cp_inside" in text


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("group norm", "SDXL"), ("decorated", "SDXL"), ("attention", "SDXL"), ("sdpa", "FLUX"), ("attention", "FLUX"),
        ("linear", "FLUX"), ("block", "FLUX"), ("object", "FLUX"), ("class", "FLUX"), ("area", "FLUX"),
        ("wan block", "Wan"), ("attention", "Wan"), ("linear", "Wan"),
    ],
)  # fmt: skip
def test_code_inside_a_network_that_a_pack_replaces_as_it_is_imported_runs_in_the_workers(
    inside: Server, kind: str, network: str
) -> None:
    picture, nothing = (replaced_inside(inside, each, network) for each in (kind, "nothing"))
    log = check(inside, picture, PROMPTS)
    assert "on 2 worker(s): sampled in" in log
    assert "undivided" not in log
    plain = latent_of(inside.client.run(nothing(PROMPTS)))
    assert apart(plain, latent_of(inside.client.run(picture(PROMPTS)))) > 100 * BAR


def test_workers_that_are_restarted_try_a_pack_again_whose_import_has_failed(replacing: Server) -> None:
    """It then imports from ComfyUI's folder `comfy`, which a pack has put onto sys.path in ComfyUI's process alone."""
    picture = on_the_model("CPTest cp_mended")
    log = check(replacing, picture)
    assert "the pack cp_mended cannot be imported in a worker (RuntimeError: not mended)" in log
    (replacing.base / "custom_nodes" / "cp_mended" / "broken").unlink()
    assert replacing.client.post("/cp/restart") == {"restarted": True}
    assert "runs in ComfyUI's process" not in check(replacing, picture)


@pytest.mark.parametrize("name", ["cp_object", "cp_partial", "cp_class"])
def test_a_sampler_that_a_pack_has_registered_as_no_function_runs_in_the_workers(replacing: Server, name: str) -> None:
    log = check(replacing, partial(plain, replace(FLUX, sampler=name)))
    assert "runs in ComfyUI's process" not in log


def test_a_sampler_of_a_packs_own_class_runs_in_the_workers(replacing: Server) -> None:
    assert "runs in ComfyUI's process" not in check(replacing, with_the_sampler("CPTest cp_replacing sampler"))


def test_a_scheduler_that_a_pack_has_registered_gives_its_noise_levels(replacing: Server) -> None:
    picture = partial(plain, replace(FLUX, scheduler="cp_quadratic"))
    plain_one = latent_of(replacing.client.run(unchanged(None)))
    assert apart(latent_of(replacing.client.run(picture(None))), plain_one) > 0.01
    assert "runs in ComfyUI's process" not in check(replacing, picture)


def test_hooks_of_a_packs_class_run_in_the_workers(replacing: Server) -> None:
    def picture(parallel: Parallel | None) -> Graph:
        graph = unchanged(parallel)
        graph["hook"] = node("CPTest cp_replacing hooks", model=link("model"))
        return with_hooks(graph, link("hook"))

    plain_one = latent_of(replacing.client.run(unchanged(None)))
    assert apart(latent_of(replacing.client.run(picture(None))), plain_one) > 0.01
    assert "runs in ComfyUI's process" not in check(replacing, picture)


def test_a_hook_that_changes_itself_as_it_is_registered_is_refused_by_name(replacing: Server) -> None:
    """ComfyUI has registered it by then, and a worker would once more."""
    graph = unchanged(SPLIT)
    graph["hook"] = node("CPTest cp_replacing hooks", model=link("model"), grows=True)
    since = replacing.log_size()
    with pytest.raises(NodeError, match=r"hooks \(scheduled LoRA\) cannot change weights"):
        replacing.client.run(with_hooks(graph, link("hook")))
    assert "Growing.add_hook_patches is called as hooks are registered" in replacing.log(since)


def test_a_callback_for_clones_that_cannot_be_sent_keeps_no_loop_in_comfyui(replacing: Server) -> None:
    """ComfyUI clones no MODEL while it samples."""
    assert "runs in ComfyUI's process" not in check(replacing, on_the_model("CPTest cp_replacing clones"))


def test_a_pack_that_replaces_code_in_the_workers_alone_keeps_its_loop_in_comfyui(replacing: Server) -> None:
    """Also once it has been imported: other workers are started, without it."""
    for _ in range(2):
        log = check(replacing, on_the_model("CPTest cp_otherwise", what="nothing"))
        assert log.count("runs in ComfyUI's process") == 1
        assert "cp_otherwise has not replaced" in log
    assert "on 2 worker(s): sampled in" in check(replacing, unchanged)


def test_code_that_a_node_replaces_in_comfyuis_process_alone_keeps_the_loop_there(replacing: Server) -> None:
    try:
        log = check(replacing, on_the_model("CPTest cp_replacing", what="sampling_function"))
    finally:
        replacing.client.run(on_the_model("CPTest cp_replacing", what="nothing")(None))
    assert "cp_replacing has not replaced comfy.samplers.sampling_function alike" in log
    assert log.count("runs in ComfyUI's process") == 1
    log = check(replacing, on_the_model("CPTest cp_replacing", what="nothing"))
    assert "on 2 worker(s): sampled in" in log, "the node has put it back"
