"""Code of installed packs runs in the workers' loop, and gives KSampler's picture."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Parallel
from .latents import apart, latent_of
from .nodes_benches import benches, write_benches
from .nodes_graphs import Trial
from .server import Server
from .test_foreign import BAR, FLUX, WAN, Picture, hooked, on_the_model, plain, with_the_guider, with_the_sampler
from .test_kin import custom, link, node
from .test_unet_nodes import ODD

SPLIT = replace(DEGREES["ulysses_2"], dtype="auto")
AUTO = Parallel(devices="cpu,cpu")


def code(kind: str) -> Picture:
    return on_the_model("CPTestPackCode", kind=kind)


def code_on_a_unet(server: Server, kind: str, name: str = "CPTestPackCode") -> Picture:
    write_benches(server, {"unet"})
    info, bench = server.client.get("/object_info"), replace(benches()["unet"], latent=ODD)
    trial = Trial(node="ModelSamplingDiscrete", bench=bench)

    def picture(parallel: Parallel | None) -> Graph:
        graph = trial.graph(info, parallel)
        graph["changed"] = node(name, model=graph["sampler"]["inputs"]["model"], kind=kind)
        graph["sampler"]["inputs"]["model"] = link("changed")
        return graph

    return picture


def left(parallel: Parallel | None) -> Graph:
    """What a pack's algorithm has left for another node."""
    graph = with_the_sampler("CPTestPackSampler")(parallel)
    graph["left"] = node("CPTestLeftByPack", sampler=link("algorithm"), latent=link("sampler"))
    graph["save"]["inputs"]["samples"] = link("left")
    return graph


def unchanged(parallel: Parallel | None) -> Graph:
    return plain(FLUX, parallel)


def check(server: Server, picture: Picture, parallel: Parallel = SPLIT) -> str:
    """Compares with ComfyUI's own sampler; returns what ComfyUI has logged of the run on the workers."""
    want, since = latent_of(server.client.run(picture(None))), server.log_size()
    got = latent_of(server.client.run(picture(parallel)))
    log = server.log(since)
    print(f"APART {apart(got, want):.1e}")
    assert apart(got, want) <= BAR
    assert "runs in ComfyUI's process" not in log
    return log


@pytest.mark.parametrize(
    "kind", ["model_sampling", "network", "settings", "dice", "cfg", "wrapper", "outer_sample", "block"]
)
def test_code_of_a_pack_on_a_model_runs_in_the_workers(server: Server, kind: str) -> None:
    assert "undivided" not in check(server, code(kind))


@pytest.mark.parametrize("late", [False, True], ids=["CP Sampler", "CP Model"])
def test_a_network_that_a_packs_guider_changes_before_it_samples_is_sampled_with_the_change(
    server: Server, late: bool
) -> None:
    """In silence, workers sampled the network as it was described when the guider was made."""
    picture = with_the_guider("CPTestPackGuider", switches=True)
    want, since = latent_of(server.client.run(picture(None))), server.log_size()
    assert apart(latent_of(server.client.run(with_the_guider("CPTestPackGuider")(None))), want) > 100 * BAR
    graph = behind_cp_model(picture)(AUTO) if late else picture(AUTO)
    assert apart(latent_of(server.client.run(graph)), want) <= BAR
    assert "[CP] Flux with diffusion_model.forward on" in server.log(since), "in the workers"


WRAPPERS = (
    "outer_sample", "prepare_sampling", "sampler_sample", "predict_noise", "calc_cond_batch", "apply_model",
    "diffusion_model",
)  # fmt: skip
KINDS = (
    "slots", "dataclass", "cache", "lru_cache", "pre_cfg", "latent_operation", "warped_sampling", "callbacks",
    "weight_adapter", "weight_function", "block_patch", *(f"{kind} wrapper" for kind in WRAPPERS),
)  # fmt: skip


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize("degrees", ["ring_2", "ulysses_2"])
@pytest.mark.parametrize("network", ["FLUX", "SDXL", "Wan"])
@pytest.mark.parametrize("kind", KINDS)
def test_code_of_every_kind_runs_in_the_workers_of_a_split_network(
    server: Server, kind: str, network: str, degrees: str
) -> None:
    job = WAN if network == "Wan" else FLUX
    on_tokens = on_the_model("CPTestPackCode", job=job, kind=kind)
    picture = code_on_a_unet(server, kind) if network == "SDXL" else on_tokens
    assert "undivided" not in check(server, picture, replace(DEGREES[degrees], dtype="auto"))


@pytest.mark.parametrize(
    "kind",
    [
        "namespace_global",
        "sent_object",
        "class_attribute",
        "assigned_function",
        "loaded_network",
        "lazily_imported",
        "in_a_module",
        "named_by_text",
        "by_a_computed_name",
        "deleted",
        "on_a_function",
    ],
)
def test_code_reads_in_the_workers_what_a_node_has_changed_in_global_objects_and_classes(
    server: Server, kind: str
) -> None:
    want = latent_of(server.client.run(code(kind)(None)))
    assert apart(latent_of(server.client.run(unchanged(None))), want) > 100 * BAR
    check(server, code(kind))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("object_global", "STORE contains a _thread.lock"),
        ("nested_global", "OPTIONS contains a _thread.lock"),
        ("filled_cache", "_drawn contains a functools._lru_cache_wrapper"),
        ("in_the_context", "CONTEXT contains a _contextvars.ContextVar"),
        ("shared_cache", "_shared contains a functools._lru_cache_wrapper"),
    ],
)
def test_code_that_reads_what_a_node_has_changed_and_cannot_be_sent_keeps_the_loop_in_comfyui(
    server: Server, kind: str, name: str
) -> None:
    picture = code(kind)
    want = latent_of(server.client.run(picture(None)))
    assert apart(latent_of(server.client.run(unchanged(None))), want) > 100 * BAR
    for _ in range(2):
        since = server.log_size()
        assert apart(latent_of(server.client.run(picture(SPLIT))), want) <= BAR
        log = server.log(since)
        assert log.count("runs in ComfyUI's process") == 1
        assert f"pack_kinds:{name}" in log


def test_global_objects_that_no_node_has_changed_keep_no_loop_in_comfyui(server: Server) -> None:
    for _ in range(2):
        assert "cannot come back" not in check(server, code("steady_globals"))


def test_an_attention_that_says_that_it_computes_each_head_by_itself_runs_on_split_heads(server: Server) -> None:
    assert "undivided" not in check(server, code("each_head"))


@pytest.mark.parametrize("kind", ["attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch"])
def test_a_patch_of_a_pack_inside_attention_sees_the_full_picture(server: Server, kind: str) -> None:
    check(server, code_on_a_unet(server, kind))


def test_a_guider_of_a_pack_runs_in_the_workers_with_its_attributes(server: Server) -> None:
    check(server, with_the_guider("CPTestPackGuider"))


def test_a_sampler_of_a_pack_runs_in_the_workers(server: Server) -> None:
    check(server, with_the_sampler("CPTestPackSampler"))


def test_what_a_packs_sampler_leaves_comes_back(server: Server) -> None:
    check(server, left)


def test_an_object_that_a_model_and_a_sampler_share_is_one_in_the_workers(server: Server) -> None:
    def picture(parallel: Parallel | None) -> Graph:
        guider = node("BasicGuider", model=link("pair"), conditioning=link("positive"))
        graph = custom(FLUX, parallel, guider, {}, 0)
        graph["pair"] = node("CPTestPackPair", model=link("model"))
        graph["sampler"]["inputs"]["sampler"] = link("pair", 1)
        del graph["algorithm"]
        return graph

    check(server, picture)


def test_a_wrapper_that_counts_its_calls_gets_all_of_them_in_every_worker(server: Server) -> None:
    """Without it each prompt would have a worker of its own."""
    auto = replace(AUTO, data_degree=0)
    check(server, code_on_a_unet(server, "latent_operation"), auto)
    assert server.client.get("/cp/status")["degrees"]["cfg_degree"] == 2
    check(server, code_on_a_unet(server, "wrapper"), auto)
    assert server.client.get("/cp/status")["degrees"]["cfg_degree"] == 1


def test_patches_that_are_one_step_old_are_refused_with_a_packs_code_inside_blocks(server: Server) -> None:
    stale = Parallel(pipeline_degree=2, patches=2, devices="cpu,cpu", ring_degree=1, ulysses_degree=1)
    with pytest.raises(NodeError, match=r"(?s)patches 2 .*replaced blocks"):
        server.client.run(on_the_model("CPTestPackCode", kind="block", job=replace(FLUX, cfg=1.0, steps=8))(stale))


@pytest.mark.parametrize("kind", ["tokens", "picture"])
def test_a_patch_of_a_pack_inside_a_unet_sees_the_full_picture(server: Server, kind: str) -> None:
    check(server, code_on_a_unet(server, kind))


@pytest.mark.parametrize("kind", ["attention", "tokens", "method", "layer"])
def test_code_that_needs_all_tokens_leaves_a_network_of_tokens_undivided(server: Server, kind: str) -> None:
    check(server, code(kind), AUTO)
    degrees = server.client.get("/cp/status")["degrees"]
    assert degrees["ring_degree"] * degrees["ulysses_degree"] == 1


def test_kjnodes_sage_attention_computes_each_ranks_heads(server: Server) -> None:
    check(server, code("sage"), AUTO)
    degrees = server.client.get("/cp/status")["degrees"]
    assert (degrees["ring_degree"], degrees["ulysses_degree"]) == (1, 2)


def test_a_method_that_comfyui_has_put_back_refuses_no_later_run(server: Server) -> None:
    """It leaves the class's own method on the layer itself."""
    for picture in (code("method"), unchanged):
        server.client.run(picture(None))
    check(server, unchanged)


def test_a_pack_that_changes_the_network_during_a_run_gets_it_undivided(server: Server) -> None:
    log = check(server, code("swap"), AUTO)
    assert "sampled again with the network undivided" in log
    assert "double_blocks.0.img_mlp" in log


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_groupnorm_that_a_pack_replaces_on_a_unet_during_a_run_is_honoured(server: Server, dtype: str) -> None:
    """As AnimateDiff-Evolved does it. A dtype that the network has anyway has no layer pass torch's by."""
    picture = code_on_a_unet(server, "torch's normalization", "CPTestTampered")
    assert "GroupNorm.forward of the network during the run" in check(server, picture, replace(AUTO, dtype=dtype))


def test_a_step_cache_on_a_split_network_is_no_change_that_a_pack_has_made(server: Server) -> None:
    """It puts its own methods onto the blocks."""
    since = server.log_size()
    server.client.run(code("cfg")(replace(SPLIT, step_cache=0.2)))
    assert "step cache skipped" in server.log(since)


def test_a_pack_that_changes_the_network_during_a_run_is_refused_a_step_cache_by_name(server: Server) -> None:
    """No step cache leaves out blocks of an undivided network."""
    with pytest.raises(NodeError, match=r"changes double_blocks\.0\S* of the network during the run"):
        server.client.run(code("swap")(replace(AUTO, step_cache=0.2)))
    assert server.workers()


def test_a_pack_that_no_worker_can_import_leaves_the_loop_in_comfyui_and_is_not_tried_again(server: Server) -> None:
    picture = on_the_model("CPTest cp_unimportable")
    want = latent_of(server.client.run(picture(None)))
    for _ in range(2):
        since = server.log_size()
        assert apart(latent_of(server.client.run(picture(SPLIT))), want) <= BAR
        log = server.log(since)
        assert log.count("runs in ComfyUI's process") == 1
        assert "the pack cp_unimportable cannot be imported in a worker (RuntimeError: only in ComfyUI)" in log
    assert server.workers()


def test_a_pack_that_ends_the_workers_as_they_import_it_ends_no_run_and_is_not_tried_again(server: Server) -> None:
    picture = on_the_model("CPTest cp_fatal")
    want = latent_of(server.client.run(picture(None)))
    ranks = []
    for _ in range(2):
        since = server.log_size()
        assert apart(latent_of(server.client.run(picture(SPLIT))), want) <= BAR
        assert "the workers ended when they had it for the first time" in server.log(since)
        ranks.append({process.pid for process in server.workers().values()})
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("degrees", [SPLIT, Parallel(cfg_degree=2)], ids=["tokens", "prompts"])
def test_a_packs_callbacks_are_called_in_every_worker_or_in_comfyui_as_often_and_in_the_order_as_natively(
    server: Server, tmp_path: Path, degrees: Parallel
) -> None:
    """One prompt has hooks; the MODEL is sampled twice and unloaded. What a call leaves is there in the next run."""
    kinds = "ON_DETACH ON_CLEANUP ON_PRE_RUN ON_PREPARE_STATE ON_APPLY_HOOKS ON_INJECT_MODEL ON_EJECT_MODEL"
    for parallel in (None, degrees):
        graph, name = hooked(parallel), "workers" if parallel else "native"
        graph["changed"] = node("CPTestPackCallbacks", model=link("model"), kinds=kinds, path=str(tmp_path / name))
        graph["sampler"]["inputs"]["model"] = link("changed")
        for seed in (1, 2):
            graph["sampler"]["inputs"]["seed"] = seed
            server.client.run(graph)
        server.client.post("/free", unload_models=True)
    server.client.run(unchanged(None))  # ComfyUI lets the MODELs go
    (comfyui, native), *_ = calls(tmp_path / "native").items()
    workers = calls(tmp_path / "workers")
    here, there = ([call for call in native if ("DETACH" in call) == detach] for detach in (True, False))
    assert here == ["ON_DETACH 1", "ON_DETACH 2", "ON_DETACH 3"]
    assert "ON_APPLY_HOOKS 2" in there
    assert workers.pop(comfyui) == here
    assert [*workers.values()] == [there] * degrees.workers


def test_a_packs_callback_that_is_called_as_hooks_are_registered_is_called_once_a_run(
    server: Server, tmp_path: Path
) -> None:
    """ComfyUI has called it before the run is described."""
    for parallel in (None, SPLIT):
        path, kinds = str(tmp_path / str(parallel is None)), "ON_REGISTER_ALL_HOOK_PATCHES ON_PRE_RUN"
        server.client.run(on_the_model("CPTestPackCallbacks", kinds=kinds, path=path)(parallel))
    ((_, native),), ((_, called),) = (calls(tmp_path / natively).items() for natively in ("True", "False"))
    assert native == called == ["ON_REGISTER_ALL_HOOK_PATCHES 1", "ON_PRE_RUN 1"]


def calls(file: Path) -> dict[str, list[str]]:
    """What each process has called, in the order of its first call."""
    called: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        process, call = line.split(" ", 1)
        called.setdefault(process, []).append(call)
    return called


def behind_cp_model(picture: Picture, *, lora: bool = False) -> Picture:
    """The same graph with ComfyUI's own sampler, whose MODEL comes from CP Model; a LoRA may lie behind it."""

    def with_cp_model(parallel: Parallel | None) -> Graph:
        graph = copy.deepcopy(picture(None))
        if lora:
            for each in graph.values():
                each["inputs"] = {
                    name: link("lora") if value == link("model") else value for name, value in each["inputs"].items()
                }
            graph["lora"] = node(
                "LoraLoaderModelOnly", model=link("model"), lora_name="flux_dev.safetensors", strength_model=0.7
            )
        if parallel is None:
            return graph
        before = copy.deepcopy(graph)
        for each in graph.values():
            each["inputs"] = {
                name: link("late") if value == link("model") else value for name, value in each["inputs"].items()
            }
        graph["late"] = node("CPModel", model=link("model"), cp_config=link("config"))
        return {**before, **graph, "config": node("CPParallelConfig", **vars(parallel))}

    return with_cp_model


MODELS = {
    "plain": unchanged,
    "a pack's code": code("settings"),
    "a guider and a sampler": with_the_guider("CPTestPackGuider"),
    "what a pack's sampler leaves": left,
}


@pytest.mark.parametrize("what", MODELS)
def test_a_sampler_node_that_is_not_ours_samples_a_cp_model_on_the_workers(server: Server, what: str) -> None:
    log = check(server, behind_cp_model(MODELS[what]))
    assert "FLUX on 2 worker(s): sampled in" in log


def test_a_lora_behind_cp_model_counts(server: Server) -> None:
    check(server, behind_cp_model(MODELS["plain"], lora=True))


def test_a_cp_model_may_go_into_a_cp_sampler(server: Server) -> None:
    graph = plain(FLUX, SPLIT)
    graph["late"] = node("CPModel", model=link("model"))
    graph["sampler"]["inputs"]["model"] = link("late")
    want = latent_of(server.client.run(plain(FLUX, None)))
    assert apart(latent_of(server.client.run(graph)), want) <= BAR


def test_a_model_of_no_known_file_is_refused_by_cp_model_itself(server: Server) -> None:
    graph = behind_cp_model(on_the_model("CPTestForeignWrapper", kind="copied"))(SPLIT)
    graph["late"]["inputs"]["model"], graph["changed"]["inputs"]["model"] = link("changed"), link("model")
    graph["sampler"]["inputs"]["model"] = link("late")
    with pytest.raises(NodeError, match=r"(?s)CPModel: .*Refused: .*does not say which file"):
        server.client.run(graph)


def test_cp_plan_says_why_a_packs_code_keeps_the_loop_in_comfyui(server: Server) -> None:
    graph = on_the_model("CPTestForeignWrapper", kind="state")(SPLIT)
    del graph["save"]
    sampler = graph.pop("sampler")["inputs"]
    sockets = {name: sampler[name] for name in ("model", "latent_image", "positive", "cp_config")}
    graph["plan"] = node("CPPlan", **sockets, cfg=2.0)
    (text,) = server.client.run(graph).outputs["plan"]["text"]
    assert "Loop: stays in ComfyUI's process" in text
    assert "Residuals, which cannot be sent to the workers" in text
