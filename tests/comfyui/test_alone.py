"""Our nodes' code in ComfyUI's python, without a server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..engine.conftest import Group, Ranks
from ..zoo import checkpoints
from .comfy import ComfyInstall
from .judged import CALLBACKS, REFUSED

VAE, TOGETHER = "tests.comfyui.vae_scenes:", "tests.comfyui.together_scenes:"
RESIDENCE, SAMPLER = "tests.comfyui.residence_scenes:", "tests.comfyui.sampler_scenes:"
CODE = "tests.comfyui.code_scenes:"
CALLBACK, CONTROL = "tests.comfyui.callback_scenes:", "tests.comfyui.control_scenes:"
SETTING = "tests.comfyui.setting_scenes:"
REPLACED, LOADING = "tests.comfyui.replaced_scenes:", "tests.comfyui.loading_scenes:"
SHARED_OUT = ["nothing", "no patches", "an empty list", "several empty lists"]


@pytest.fixture(scope="module")
def processes(comfy: ComfyInstall) -> Iterator[Ranks]:
    """That have ComfyUI and our pack imported."""
    scenes = (
        "vae", "together", "residence", "sampler", "code", "callback", "control", "replaced", "loading", "setting",
    )  # fmt: skip
    modules = [f"tests.comfyui.{name}_scenes" for name in scenes]
    ranks = Ranks(comfy.python, modules, {"COMFYUI_PATH": str(comfy.root)})
    yield ranks
    ranks.close()


@pytest.fixture
def alone(processes: Ranks) -> Group:
    return Group(processes, 1)


@pytest.fixture(scope="module")
def demo(comfy: ComfyInstall) -> None:
    """The demo's model outside of ComfyUI."""
    if subprocess.run([comfy.python, "-c", "import diffusers"], capture_output=True, check=False).returncode:
        pytest.skip(f"no diffusers in {comfy.python}, which the demo's model needs outside of ComfyUI")


@pytest.fixture
def two(processes: Ranks) -> Group:
    return Group(processes, 2)


def test_a_variable_that_a_packs_function_has_changed_in_the_function_around_it_comes_back(alone: Group) -> None:
    assert alone.run(f"{CODE}counted") == [[1, 2, 3]]


def test_a_random_generator_in_a_packs_object_goes_to_the_workers_and_comes_back(alone: Group) -> None:
    (equal,) = alone.run(f"{CODE}drawn")
    assert equal == {"Python's": [True, True], "torch's": [True, True], "torch's own": [True]}


def test_what_forward_does_beside_the_network_is_done_once_where_the_loop_stays_in_comfyui(alone: Group) -> None:
    """Every network of the zoo: ComfyUI's process does it, with the wrappers, and a worker does not do it again."""
    assert alone.run(f"{TOGETHER}stepwise") == [{}]


@pytest.mark.parametrize("how", ["copy", "deepcopy"])
def test_a_copy_of_a_cp_vae_is_one(alone: Group, how: str) -> None:
    (made,) = alone.run(f"{VAE}copies", how=how)
    assert made["kind"] == ["ParallelVAE", "RemoteVAE"]
    assert made["shared"] == (how == "copy")
    assert made["one"], "what it asks is the VAE that it is a copy of"
    assert made["equal"]
    assert made["shape"] == made["expected"]


def test_a_cp_vae_says_what_it_has_also_while_it_is_made(alone: Group) -> None:
    """Python asks for these of an object that has no attributes yet."""
    names = ["decoder", "anything", "_vae", "__deepcopy__", "__setstate__", "__getstate_of_a_kind__"]
    (whole,) = alone.run(f"{VAE}answers", half_made=False, names=names)
    (half,) = alone.run(f"{VAE}answers", half_made=True, names=names)
    assert whole == {**dict.fromkeys(names, False), "decoder": True, "_vae": True}
    assert half == dict.fromkeys(names, False)


def test_widgets_and_outputs_that_a_later_ksampler_has_come_along_by_themselves(alone: Group) -> None:
    (answer,) = alone.run(f"{SAMPLER}like_later", native="LaterKSampler")
    given = answer["input"]
    assert list(given["required"])[-2:] == ["denoise", "eta"]
    assert given["required"]["eta"] == ["FLOAT", {"default": 0.5, "step": 0.01, "advanced": True}]
    assert list(given["optional"]) == ["preview", "hint", "cp_config"]
    assert given["optional"]["preview"][0] == "COMBO"
    assert given["optional"]["preview"][1]["options"] == ["none", "small"]
    assert given["optional"]["hint"] == ["MASK", {}]
    (answer,) = alone.run(f"{SAMPLER}like_later", native="LaterSamplerCustom")
    assert list(answer["input"]["optional"]) == ["skip", "cp_config"]
    assert answer["input"]["optional"]["skip"] == ["INT", {"default": 2, "max": 9, "tooltip": "Steps to skip."}]
    assert answer["output_name"] == ["output", "denoised_output", "left"]
    assert answer["output"] == ["LATENT", "LATENT", "SIGMAS"]


@pytest.mark.parametrize("of_guider", [False, True], ids=["on MODEL", "on the guider"])
@pytest.mark.parametrize("patches", [*SHARED_OUT, "a patch"])
def test_prompts_are_shared_out_by_workers_as_they_are_by_the_host(two: Group, patches: str, of_guider: bool) -> None:
    """A batch of two, and two prompts: two rows are one prompt's, four are those of both."""
    for rank in two.run(f"{TOGETHER}rows_sampled", patches=patches, of_guider=of_guider):
        assert rank["sent"] == (patches == "a patch")
        assert rank["planned"] == (rank["sent"] and not of_guider)
        assert rank["rows"] == ([4, 4] if rank["sent"] else [2, 2])


@pytest.mark.parametrize("patches", [*SHARED_OUT, "a patch"])
def test_a_patch_inside_the_network_sees_all_rows_of_an_evaluation(two: Group, patches: str) -> None:
    for rank in two.run(f"{TOGETHER}rows_evaluated", patches=patches):
        assert rank == {"given": [4] if patches == "a patch" else [2], "out": 4}


@pytest.mark.parametrize(
    ("node", "widgets", "kept", "shared"),
    [
        ("nodes_sag.SelfAttentionGuidance", {"scale": 0.5, "blur_sigma": 2.0}, True, "attn_and_record .*post_cfg"),
        ("nodes_wan.WanAnimate2Cache", {"device": "cpu"}, True, "PoseBranchCache .*<lambda>"),
        ("nodes_flux.FluxKVCache", {}, True, ""),
        ("nodes_hypertile.HyperTile",
         {"tile_size": 64, "swap_size": 2, "max_depth": 0, "scale_depth": False}, True, ""),
        ("nodes_tomesd.TomePatchModel", {"ratio": 0.3}, True, ""),
        ("nodes_apg.APG", {"eta": 0.5, "norm_threshold": 5.0, "momentum": -0.5}, False, ""),
        ("nodes_pag.PerturbedAttentionGuidance", {"scale": 3.0}, False, ""),
        ("nodes_slg.SkipLayerGuidanceDiT", {"scale": 3.0, "start_percent": 0.0, "end_percent": 1.0,
                                            "double_layers": "0"}, False, ""),
        ("nodes_chroma_radiance.ChromaRadianceOptions",
         {"preserve_wrapper": True, "start_sigma": 1.0, "end_sigma": 0.0, "nerf_tile_size": 16,
          "force_sequential_txt_ids": True}, False, ""),
        ("nodes_easycache.LazyCacheNode",
         {"reuse_threshold": 0.2, "start_percent": 0.1, "end_percent": 0.9, "verbose": False}, False, ""),
        ("nodes_rope.ScaleROPE", dict.fromkeys(["scale_x", "shift_x", "scale_y", "shift_y", "scale_t", "shift_t"], 1.5),
         False, ""),
    ],
)  # fmt: skip
def test_what_a_node_keeps_of_an_evaluation_is_known_by_its_functions(
    alone: Group, node: str, widgets: dict[str, Any], kept: bool, shared: str
) -> None:
    ((keeps, refused),) = alone.run(f"{TOGETHER}kept_by", node=node, widgets=widgets)
    assert keeps == kept
    assert re.search(shared, refused) if shared else not refused


@pytest.mark.parametrize(("what", "says"), [("forced", "forced hooks"), ("options", "would change them again")])
def test_hooks_that_no_worker_would_apply_once_are_known(alone: Group, what: str, says: str) -> None:
    (why,) = alone.run(f"{TOGETHER}why_not_sent", what=what)
    assert says in why


def test_where_a_network_may_keep_what_it_made_nothing_is_recorded(alone: Group) -> None:
    (kept,) = alone.run(f"{TOGETHER}reached", name="ar_state", kept=True)
    (given,) = alone.run(f"{TOGETHER}reached", name="sigmas", kept=False)
    assert (kept, given) == ("the network may keep something in ar_state", "")


@pytest.mark.usefixtures("demo")
def test_comfyui_and_the_page_let_models_go_at_once_and_the_workers_stay(alone: Group) -> None:
    (rounds,) = alone.run(f"{RESIDENCE}unloaded_by_both", times=2)
    for answer in rounds:
        assert answer["alive"], "a healthy group was ended"
        assert answer["listed"] == []
        assert answer["freed"] in ([], ["demo"], ["demo"] * 2), "whoever came first"


@pytest.mark.usefixtures("demo")
def test_a_group_whose_idle_time_ends_while_a_model_is_let_go_ends_afterwards(alone: Group) -> None:
    (answer,) = alone.run(f"{RESIDENCE}idle_while_unloading")
    assert answer == {"error": None, "alive meanwhile": True, "reason": "ended after 0.25 s without a run"}


@pytest.mark.usefixtures("demo")
@pytest.mark.sweep
def test_recordings_go_before_a_model_is_unloaded_or_refused(alone: Group, tmp_path: Path) -> None:
    (answer,) = alone.run(f"{RESIDENCE}recordings_go_first", folder=str(tmp_path))
    before, after, last = answer["before"], answer["after"], answer["last"]
    assert all(model["recorded"] > 1000 for model in before.values())
    assert not answer["unloaded"], "ComfyUI has got what it asked for"
    assert [after[name]["recorded"] for name in ("high", "low")] == [0, before["low"]["recorded"]]
    assert answer["lack"] is None
    assert last["low"]["recorded"] == 0, "it was in the other's place"
    sizes = [{name: model["resident"] for name, model in models.items()} for models in (before, after, last)]
    assert sizes[0] == sizes[1] == sizes[2], "all weights stay"


def test_comfyui_is_not_asked_for_gpus_that_workers_have(alone: Group) -> None:
    """To ask opens a CUDA context there, in ComfyUI's process."""
    assert alone.run(f"{RESIDENCE}free_on_gpus_of_workers") == [[[20, 16], [20, 16]]]


def test_comfyui_opens_no_gpu_to_make_room_where_only_workers_are(alone: Group) -> None:
    (answer,) = alone.run(f"{RESIDENCE}room_on_a_gpu_of_workers")
    assert answer == [[True, True], [1 << 20] * 2, "asked"], "the last used first"


def test_unload_models_ends_though_garbage_is_collected_meanwhile(alone: Group) -> None:
    """ComfyUI walks its list by index, and drops from it what is collected: its thread for prompts would end."""
    assert alone.run(f"{RESIDENCE}collected_while_unloading") == [[True]]


@pytest.mark.usefixtures("demo")
def test_a_run_is_planned_once(alone: Group, tmp_path: Path) -> None:
    (times,) = alone.run(f"{RESIDENCE}plans_of_a_run", folder=str(tmp_path))
    assert times == {"run": 1, "same size": 0, "other size": 1}


@pytest.mark.sweep
def test_to_let_a_model_go_waits_for_no_group_that_is_started(alone: Group) -> None:
    (answer,) = alone.run(f"{RESIDENCE}unloading_a_group_that_is_replaced")
    assert answer["waited"] < 1
    assert answer["starting"], "too late to tell"


@pytest.mark.sweep
def test_what_is_free_is_counted_each_time_and_not_when_the_workers_started(alone: Group) -> None:
    ((first, second, third),) = alone.run(f"{RESIDENCE}main_memory", times=3)
    assert second < 0.8 * first
    assert third < 0.9 * second


def test_a_function_of_another_comfyui_is_refused_by_name_and_no_other_takes_its_place(alone: Group) -> None:
    assert alone.run(f"{CODE}made_again") == ["made"]
    gone = "comfy.samplers:ksampler.<locals>.nobody"
    for changed in ({"code": "another"}, {"name": gone}):
        (answer,) = alone.run(f"{CODE}made_again", **changed)
        assert changed.get("name", "comfy.samplers:ksampler.<locals>.dpm_fast_function") in answer
        assert answer.endswith("restart ComfyUI")


def test_patches_that_have_run_are_described_without_what_they_keep_of_the_run(alone: Group) -> None:
    assert alone.run(f"{CODE}tokens_merged_after_a_run") == [True]


def test_what_clip_vision_saw_goes_to_the_workers(alone: Group) -> None:
    assert alone.run(f"{CODE}what_clip_vision_saw") == [[[3, 28, 28]] * 2]


def test_an_object_whose_class_is_in_no_module_of_comfyuis_is_refused_as_what_it_is(alone: Group) -> None:
    (answer,) = alone.run(f"{CODE}made_inside_of_a_function")
    assert answer.startswith("the model sampling comfy.model_base.model_sampling.<locals>.ModelSampling")
    assert "is made by a function of ComfyUI's as it runs" in answer


def test_a_worker_imports_a_pack_of_the_same_files_alone_and_says_why_not_another(alone: Group) -> None:
    (why,) = alone.run(f"{CODE}packs_imported")
    assert why["there"] == ""
    assert "is another than that of ComfyUI's process: __init__.py differs" in why["other"]
    assert re.search(r"the pack nowhere is not in .*install it there", why["missing"])
    assert "is not part of ComfyUI" in why["outside"]
    assert "cannot be imported in a worker (SystemExit: 3)" in why["failing"]
    assert "new.py has changed since ComfyUI was started" in why["new"]


@pytest.mark.parametrize(
    ("another", "file"),
    [({"nodes.py": "VALUE = 1"}, "nodes.py"), ({"nodes.py": None}, "nodes.py"), ({"lib/more.py": ""}, "lib/more.py")],
    ids=["another", "missing", "more"],
)
def test_a_pack_of_another_version_on_another_machine_is_refused_with_pack_file_and_machine(
    two: Group, another: dict[str, str | None], file: str
) -> None:
    first, second = two.run(f"{CODE}packs_of_two_machines", another=another)
    assert re.search(rf"the pack there in /.*/there is another than .*: {file} differs.*\(on 10\.0\.0\.2\)$", second)
    assert "there" not in first, "it is rank 1 whose refusal is shown"


def test_a_pack_of_the_same_version_on_another_machine_is_imported_there(two: Group) -> None:
    assert two.run(f"{CODE}packs_of_two_machines", another={}) == ["", ""]


def test_a_hypernetwork_that_no_loader_has_read_is_refused(alone: Group) -> None:
    (sentence,) = alone.run(f"{CODE}hypernetwork_of_no_file")
    assert sentence.startswith("attn1_patch contains a comfy_extras.nodes_hypernetwork.load_hypernetwork_patch")
    assert sentence.endswith("ComfyUI's loader has not read it from a file")


def test_a_pack_that_goes_to_another_folder_does_not_start_the_workers_anew(alone: Group) -> None:
    ((before, after),) = alone.run(f"{CODE}folder_after_a_pack_has_gone_elsewhere")
    assert before == after != "/"


@pytest.mark.parametrize(("name", "coupled"), [("SVD", True), ("SDXL", False)])
def test_frames_of_a_video_stay_together_and_its_prompts_need_not(alone: Group, name: str, coupled: bool) -> None:
    """They attend to each other, as images of a batch do not."""
    assert alone.run(f"{CODE}couples_frames", name=name) == [[coupled, False]]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["seedvr2", "trellis2 shapes", "trellis2 textures"])
def test_images_are_not_shared_out_where_a_network_goes_by_their_places(
    processes: Ranks, name: str, world: int
) -> None:
    """SeedVR2 swaps the halves of a batch with both prompts; Trellis2 has the voxels of all shapes in one table."""
    for answer in Group(processes, world).run(f"{TOGETHER}shared_out", name=name):
        assert answer == [0.0, False], "each prompt may still have workers of its own"


@pytest.mark.parametrize(
    ("guides", "split"),
    [
        (None, True),
        ([{"strength": 1.0, "pixel_mask": None}], True),
        ([{"strength": 1.0}, {"strength": 0.6}], False),
        ([{"strength": 1.0, "pixel_mask": 1}], False),
    ],
)
def test_guides_that_mask_each_query_leave_the_network_unsplit(alone: Group, guides: list | None, split: bool) -> None:
    name = "LTX-2" if split else "Identity with guides whose strength is not 1"
    assert alone.run(f"{CODE}guided_by", guides=guides) == [[split, name]]


def test_prompts_with_hooks_are_sampled_as_without_dynamic_vram(alone: Group) -> None:
    assert alone.run(f"{CODE}hooked") == [[True, False, False]]


def test_a_worker_that_raised_an_error_has_another_help_page_than_one_that_was_killed(alone: Group) -> None:
    (pages,) = alone.run(f"{CODE}help_pages")
    assert pages == {
        page: True for page in ("worker-was-killed", "worker-is-silent", "worker-failed", "out-of-gpu-memory")
    }


def test_a_gguf_file_takes_no_weight_dtype(alone: Group) -> None:
    (refused,) = alone.run(f"{CODE}gguf_with_a_dtype")
    assert "weight_dtype fp8_e5m2: a .gguf file has a format of its own; choose default" in refused


def test_a_plan_with_boxes_in_a_prompt_keeps_the_images_of_a_batch_together_as_the_run_does(alone: Group) -> None:
    assert alone.run(f"{CODE}planned_with_boxes") == [[False, True]]


def test_the_log_has_no_traceback_of_a_refusal_or_a_dead_worker_and_that_of_a_crash_which_handles_one(
    alone: Group,
) -> None:
    assert alone.run(f"{CODE}logged") == [{"refused": False, "crashed": True, "refused after": False, "died": False}]


def test_conditions_of_a_native_samplers_run_are_forgotten_when_it_is_over(alone: Group) -> None:
    assert alone.run(f"{RESIDENCE}settled") == [{"before": 1, "after": 0, "listed": 2}]


@pytest.mark.parametrize(
    ("what", "seen", "left"),
    [
        ("free", [], 0), ("free a little", [], 0), ("load", [], 1), ("free by the page", [None], 1),
        ("sample, and go on", [], 1),
        ("sample natively", [], 1), ("decode", [True], 1), ("look", ["sampling"], 1), ("end when idle", [], 1),
    ],
)  # fmt: skip
def test_what_a_callback_does_leaves_the_run_as_it_is(alone: Group, what: str, seen: list[Any], left: int) -> None:
    """`left` models are in the workers after it: one that ComfyUI lets go is unloaded when the run has ended."""
    (answer,) = alone.run(f"{CALLBACK}in_a_callback", what=what)
    assert answer == {"error": "", "equal": True, "seen": seen, "left": left, "same group": True, "again": True}


@pytest.mark.parametrize(
    ("what", "says", "stays"),
    [
        ("sample", "Refused: the workers are in the middle of a run", True),
        ("restart", "a callback asked for it", False),
    ],
)
def test_a_callback_that_ends_its_run_ends_it_at_once_and_the_next_one_is_sound(
    alone: Group, what: str, says: str, stays: bool
) -> None:
    (answer,) = alone.run(f"{CALLBACK}in_a_callback", what=what)
    assert says in answer["error"]
    assert (answer["same group"], answer["again"]) == (stays, True)


def test_a_sampler_that_draws_from_torchs_own_generator_leaves_it_as_comfyui_does(alone: Group) -> None:
    (runs,) = alone.run(f"{CALLBACK}drawn_in_a_row", times=2)
    assert max(map(max, runs)) < 1e-3


def test_the_last_step_is_delivered_once_also_where_several_have_its_number(alone: Group) -> None:
    (dropped,) = alone.run(f"{CALLBACK}delivered", steps=[[3, 1.0]], last=[3, 9.0])
    (arrived,) = alone.run(f"{CALLBACK}delivered", steps=[[3, 1.0], [3, 9.0]], last=[3, 9.0])
    assert dropped == arrived == [[3, 1.0], [3, 9.0]]


@pytest.mark.parametrize(("batch", "index", "rows"), [(4, 0, [0, 1]), (4, 1, [2, 3]), (1, 0, [0]), (1, 1, [0])])
def test_a_control_net_computes_the_rows_of_its_batch_group(alone: Group, batch: int, index: int, rows: list) -> None:
    """An idle group computes one, as of the network; a picture for all rows, and what is no rows, stay as they are."""
    made = alone.run(f"{CONTROL}rows_that_its_network_has", batch=batch, index=index)
    assert made == [[rows, [*range(batch)], [0], [3]]]


@pytest.mark.parametrize(
    ("what", "says"),
    [("patched", "a LoRA, hooks or"), ("replaced", "another pack's code on it"), ("file", "has not read from a file")],
)
def test_a_control_net_that_workers_cannot_load_says_why(alone: Group, what: str, says: str) -> None:
    assert says in alone.run(f"{CONTROL}refusal_of_one", what=what)[0]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a pack's", "control_scenes.PacksVAE, which is not ComfyUI's own"),
        ("patches", "it is patched; take the patch away"),
    ],
)
def test_a_vae_that_workers_cannot_load_says_why(alone: Group, what: str, says: str) -> None:
    assert says in alone.run(f"{CONTROL}refusal_of_a_vae", what=what)[0]


@pytest.mark.parametrize("in_a_file", [True, False])
def test_a_vae_in_a_worker_is_loaded_once_and_encodes_as_comfyui_does(
    alone: Group, tmp_path: Path, in_a_file: bool
) -> None:
    file = str(tmp_path / "vae.safetensors") if in_a_file else ""
    assert alone.run(f"{CONTROL}encoded_in_a_worker", file=file) == [[True, [True] * 5, True, []]]


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("an object's method", r"Flux\.apply_model"), ("a layer", "final_layer"),
        ("a MODEL's method", r"ModelPatcher\.model_dtype"), ("a MODEL's class", "the MODEL's class"),
    ],
)  # fmt: skip
def test_what_a_pack_replaces_on_one_model_is_refused_by_name(alone: Group, what: str, name: str) -> None:
    (run,) = alone.run(f"{REPLACED}sampled_with", replaced=what)
    assert re.search(f"{name} .*a_pack.*remove it", run["refused"])


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("a function of the loop", "comfy.samplers.sampling_function"),
        ("a method of the loop", "comfy.samplers.CFGGuider.predict_noise"),
        ("a class of the loop", "the GUIDER a_pack"),
        ("a method of the model", "comfy.model_base.BaseModel._apply_model"),
        ("an algorithm", ""),
    ],
)
def test_what_a_pack_replaces_in_the_loop_keeps_the_loop_in_comfyui(alone: Group, what: str, name: str) -> None:
    """Workers have ComfyUI's own code."""
    (run,) = alone.run(f"{REPLACED}sampled_with", replaced=what)
    assert (run["does something"], run["equal"], len(run["said"])) == (True, True, 1)
    assert name in run["said"][0]


def test_what_a_pack_adds_to_comfyui_keeps_no_loop_out_of_the_workers(alone: Group) -> None:
    (run,) = alone.run(f"{REPLACED}sampled_with", replaced="an algorithm of its own")
    assert run == {"does something": False, "equal": True, "said": []}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("a function of the network", "comfy.ldm.flux.layers.apply_mod"),
        ("a method of the network", "comfy.ldm.flux.layers.SingleStreamBlock.forward"),
        ("a method of layers", "comfy.ops.disable_weight_init.Linear.forward"),
        ("a function of layers", "comfy.ops.scaled_dot_product_attention"),
        ("a function that merges", "comfy.lora.calculate_weight"),
        ("a method of torch", "torch.nn.modules.activation.SiLU.forward"),
        ("a function of torch.nn", "torch.nn.functional.layer_norm"),
        ("attention, by another function of ComfyUI's", "comfy.ldm.flux.math.optimized_attention"),
        ("torch's attention", "torch.nn.functional.scaled_dot_product_attention"),
        ("a function of torch", "torch.addcmul"),
    ],
)
def test_a_network_whose_code_a_pack_has_replaced_is_sampled_by_comfyui_itself(
    alone: Group, what: str, name: str
) -> None:
    """From its import on, often: who merely has such a pack is not refused every run."""
    (run,) = alone.run(f"{REPLACED}sampled_with", replaced=what)
    assert (run["does something"], run["equal"], len(run["said"])) == (True, True, 1)
    assert f"replaced {name} by" in run["said"][0]
    assert "Remove that pack" in run["said"][0]


SILU = "torch.nn.modules.activation.SiLU.forward"


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("nothing", []), ("another class", [SILU]), ("no file", [SILU]),
        ("other arguments", ["comfy.ldm.flux.layers.timestep_embedding"]),
        ("a hook on all", ["torch.nn.modules.module._global_forward_hooks"]),
    ],
)  # fmt: skip
def test_code_that_is_replaced_by_what_is_in_no_pack_is_found(alone: Group, what: str, names: list[str]) -> None:
    """Workers have the original, and would give another picture in silence."""
    assert alone.run(f"{REPLACED}replaced_without_a_pack", what=what) == [names]


@pytest.mark.parametrize("inside", [False, True], ids=["in a prompt", "in blocks"])
def test_gligen_whose_code_a_pack_has_replaced_is_refused_by_name(alone: Group, inside: bool) -> None:
    (why,) = alone.run(f"{REPLACED}why_no_gligen", inside=inside)
    assert "another pack has replaced comfy.gligen.Gligen._set_position by other code" in why
    assert ("remove it" in why) == inside


@pytest.mark.parametrize("how", ["a method", "a hook", "a layer"])
def test_a_vae_whose_layers_a_pack_has_changed_is_decoded_by_comfyui_itself(alone: Group, how: str) -> None:
    """Make Circular VAE replaces a method of each convolution, before CP VAE or behind it."""
    (answer,) = alone.run(f"{VAE}changed", how=how)
    native, equal, reason = answer
    assert (native, equal) == (True, True)
    assert "inside its network there is" in reason


def test_a_replacement_that_only_passes_on_to_the_original_replaces_nothing(alone: Group, tmp_path: Path) -> None:
    """ComfyUI-Easy-Use puts one into every UNet, from its import on."""
    (found,) = alone.run(f"{REPLACED}passed_on", folder=str(tmp_path))
    assert {name for name, passed in found.items() if passed} == {"keeping", "around", "twice"}
    assert len(found) == 10


def test_prompts_and_images_stay_together_where_replaced_code_may_see_several(alone: Group) -> None:
    assert alone.run(f"{REPLACED}coupled_by_replaced_code") == [[True, False]]


def test_attention_that_a_pack_has_set_before_we_are_imported_is_not_taken_for_comfyuis_choice(alone: Group) -> None:
    assert alone.run(f"{REPLACED}attention_set_before_us") == [True]


def test_replaced_code_that_keeps_nothing_between_evaluations_lets_prompts_be_shared_out(alone: Group) -> None:
    (kept,) = alone.run(f"{REPLACED}kept_between_evaluations")
    assert kept == ["a_variable", "a_list", "an_attribute", "under_comfyuis_name", "decorated", "by_another", "a_cell"]


@pytest.mark.parametrize("unloaded", [False, True])
def test_a_method_that_ksampler_has_patched_once_keeps_no_model_from_the_workers(alone: Group, unloaded: bool) -> None:
    assert alone.run(f"{REPLACED}after_a_patched_run", unloaded=unloaded) == [True]


def test_each_kind_of_callback_that_comfyui_has_is_judged(alone: Group) -> None:
    """One that a later ComfyUI adds is refused until model_patches.py has it."""
    (names,) = alone.run(f"{REPLACED}callback_names")
    assert {*names} == CALLBACKS.keys()


@pytest.mark.parametrize("names", [["ON_DETACH", "ON_CLEANUP", "ON_PRE_RUN"], ["ON_PREPARE_STATE", "ON_LOAD"],
                                   ["ON_REGISTER_ALL_HOOK_PATCHES", "ON_APPLY_HOOKS"]])  # fmt: skip
def test_a_callback_of_a_pack_that_no_worker_has_is_called_as_often_as_natively_or_refused(
    alone: Group, names: list[str]
) -> None:
    (called,) = alone.run(f"{REPLACED}callbacks_called", names=names)
    for name, (natively, with_cp_sampler) in called.items():
        assert natively or name == "ON_APPLY_HOOKS"
        assert with_cp_sampler == ("refused" if CALLBACKS[name][0] == REFUSED else natively), name


def test_clones_for_other_gpus_are_left_out_where_workers_divide_a_run(alone: Group) -> None:
    (runs,) = alone.run(f"{REPLACED}with_clones_for_gpus")
    assert runs["in the workers"] == {"equal": True, "stays": False, "said": 0, "clone loaded": False}
    assert runs["in ComfyUI's process"] == {"equal": True, "stays": True, "said": 1, "clone loaded": False}


@pytest.mark.parametrize("dynamic_vram", [False, True])
def test_small_layers_are_rounded_unless_the_host_has_dynamic_vram(
    alone: Group, tmp_path: Path, dynamic_vram: bool
) -> None:
    (dtypes,) = alone.run(f"{LOADING}rounded", folder=str(tmp_path), dynamic_vram=dynamic_vram)
    small = "torch.float32" if dynamic_vram else "torch.float8_e4m3fn"
    assert dtypes["small"] == [small]
    assert dtypes["large"] == ["torch.float8_e4m3fn"]
    assert set(dtypes["merged"]) == {small, "torch.float8_e4m3fn"}


@pytest.mark.parametrize("quantised", ["", "comfy_fp8", "int8", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("dynamic_vram", [False, True])
def test_a_lora_is_merged_as_the_hosts_comfyui_merges_it(
    alone: Group, tmp_path: Path, dynamic_vram: bool, quantised: str
) -> None:
    (merged,) = alone.run(f"{LOADING}merged", folder=str(tmp_path), dynamic_vram=dynamic_vram, quantised=quantised)
    assert merged == {"as fetched": [dynamic_vram] * 2, "as in the file": [dynamic_vram and not quantised] * 2}


@pytest.mark.parametrize("dynamic_vram", [False, True])
def test_only_fp8_of_the_file_is_multiplied_in_fp8_where_the_host_has_dynamic_vram(
    alone: Group, dynamic_vram: bool
) -> None:
    (exact,) = alone.run(f"{LOADING}fp8_products", dynamic_vram=dynamic_vram)
    assert exact == {"float32": dynamic_vram, "float8_e4m3fn": False}


@pytest.mark.parametrize("host", ["plain", "dynamic VRAM", "a MODEL that casts"])
def test_layers_call_a_method_that_a_pack_has_replaced_where_comfyuis_do(
    alone: Group, tmp_path: Path, host: str
) -> None:
    """Those that cast their weights at each use call no method of torch's layer."""
    (found,) = alone.run(f"{LOADING}layers_that_call_torchs", folder=str(tmp_path), host=host)
    assert found == {"called": host == "plain", "narrow": True}


def test_a_checkpoint_is_not_loaded_to_a_gpu_before_it_is_used(alone: Group, tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path, "flux_dev", prefix="model.diffusion_model.")
    (answer,) = alone.run(f"{LOADING}at_once", path=str(path))
    assert answer == {"views": True, "loaded": 0, "restored": True}


@pytest.mark.parametrize("layer", ["diffusion_model.double_blocks.0", "diffusion_model"])
def test_layers_that_a_pack_has_compiled_and_comfyui_has_loaded_keep_no_model_from_the_workers(
    alone: Group, tmp_path: Path, layer: str
) -> None:
    path = checkpoints.write(tmp_path, "flux_dev")
    plain, compiled = alone.run(f"{LOADING}compiled_by_a_patch", path=str(path), layer=layer)[0]
    assert plain == [True, False, []]
    assert compiled == [True, True, []]


@pytest.mark.parametrize("text", ["0", "False", "FALSE", "No", "off", "Off"])
def test_workers_do_not_start_with_comfyui_where_the_environment_says_no(alone: Group, text: str) -> None:
    variables = {"CP_START_WITH_COMFYUI": text}
    made = alone.run(f"{SETTING}chosen", name="StartWithComfyUI", saved=True, variables=variables)
    assert made == [[False, []]]


@pytest.mark.parametrize("text", ["100", "-1", "two", "9" * 5000])
def test_a_degree_in_the_environment_that_is_none_is_warned_about_and_the_saved_one_is_used(
    alone: Group, text: str
) -> None:
    variables = {"CP_RING_DEGREE": text}
    ((degree, warned),) = alone.run(f"{SETTING}chosen", name="RingDegree", saved=2, variables=variables)
    assert degree == 2
    assert warned == [f"[CP] CP_RING_DEGREE={text!r} is not a degree from 0 to 64; the saved setting is used"]


def test_a_vae_without_a_config_runs_on_the_default_devices_as_a_sampler_does(alone: Group) -> None:
    assert alone.run(f"{SETTING}default_devices", devices="cpu,cpu") == [[["cpu", "cpu"]] * 2]


@pytest.mark.parametrize("awaited", [True, False])
def test_stop_while_workers_start_interrupts_the_prompt_that_awaits_them_and_no_other(
    alone: Group, awaited: bool
) -> None:
    assert alone.run(f"{SETTING}stopped_while_workers_start", awaited=awaited) == [[200 if awaited else 409, awaited]]


@pytest.mark.parametrize("layout", ["", "TensorCoreFP8E4M3Layout"])
def test_a_model_of_mixed_precision_is_merged_by_workers_to_the_bits_of_comfyui(alone: Group, layout: str) -> None:
    assert alone.run(f"{CODE}merged_by_workers", layout=layout) == [True]


@pytest.mark.parametrize("what", ["merge", "hook", "two MODELs"])
def test_weights_that_are_too_large_to_send_are_refused_with_a_way_out_before_workers_start(
    alone: Group, what: str
) -> None:
    (reason,) = alone.run(f"{CODE}too_large", what=what)
    assert reason.startswith("payload.size: this run would send 22.0 GiB to the workers, and the limit is 16.0 GiB. ")
    assert "save the merged MODEL" in reason


def test_all_copies_of_a_control_lora_have_the_file_that_comfyui_read_it_from(alone: Group, tmp_path: Path) -> None:
    ((*copies, made),) = alone.run(f"{CONTROL}files_of_a_control_lora", folder=str(tmp_path))
    assert copies == [str(tmp_path / "control_lora.safetensors")] * 2
    assert "that ComfyUI's loader has not read from a file" in made


def test_a_linked_model_is_named_by_the_path_that_the_user_chose(alone: Group, tmp_path: Path) -> None:
    """Another machine looks for that one."""
    (path,) = alone.run(f"{CALLBACK}path_of_a_link", folder=str(tmp_path))
    assert path == str(tmp_path / "chosen.safetensors")


@pytest.mark.parametrize("other_patches", [False, True], ids=["same LoRA", "another strength"])
@pytest.mark.parametrize("dynamic_vram", [False, True])
def test_weights_that_were_given_back_are_brought_back_alone_and_are_what_they_were(
    alone: Group, tmp_path: Path, dynamic_vram: bool, other_patches: bool
) -> None:
    case = {"folder": str(tmp_path), "dynamic_vram": dynamic_vram, "other_patches": other_patches}
    (found,) = alone.run(f"{LOADING}given_back", **case)
    assert found["moved"], "recordings read from this memory"
    assert 1 / 3 <= found["counted"] < 0.8
    assert found["in file"]
    assert 0 < found["layers"] < found["all layers"]
    assert found["back"]
    assert found["loaded anew"] == 0, "the whole model is not loaded module by module"
    assert found["kept"] == []
    assert found["other"] == []


@pytest.mark.parametrize("mode", ["replicate", "shard", "offload"])
def test_a_text_encoder_takes_what_it_needs_from_the_gpu_that_it_is_on(alone: Group, mode: str) -> None:
    """And the other GPUs keep their weights, until none is left."""
    (found,) = alone.run(f"{RESIDENCE}encoder_on_one_gpu", mode=mode)
    assert found["part stays"]
    assert found["after a part"] == [8_000, 12_000, 12_000, 12_000]
    assert found["counted"] == [8_000, 12_000, 12_000, 12_000]
    assert found["counted again"] == 12_000
    assert found["gone"]
    assert found["after all"] == [0, 12_000, 12_000, 12_000]
    assert found["listed"] == 1
    assert found["counted then"] == [0, 12_000, 12_000, 12_000]
    assert found["listed at last"] == 0
    assert found["asked"] == [*(["give back", rank] for rank in (0, 0, 1, 2)), "unload"]


def test_a_run_that_died_for_lack_of_memory_teaches_the_next_plan(alone: Group, tmp_path: Path) -> None:
    (found,) = alone.run(f"{RESIDENCE}plans_after_memory_ran_out", folder=str(tmp_path))
    (limit,), (needed, at_once) = found["too many"], found["next"]
    assert needed <= limit
    assert at_once == 1, "prompts go one after the other, which needs less"
    full, all_at_once = found["other"]
    assert full > limit
    assert all_at_once == 0
    assert found["nothing fits"][0] > limit, "else no run of this size could be tried again"
