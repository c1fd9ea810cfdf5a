"""Our nodes' code in ComfyUI's python, without a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..engine.conftest import Group, Ranks
from .comfy import ComfyInstall

VAE, TOGETHER = "tests.comfyui.vae_scenes:", "tests.comfyui.together_scenes:"
RESIDENCE, SAMPLER = "tests.comfyui.residence_scenes:", "tests.comfyui.sampler_scenes:"
SHARED_OUT = ["nothing", "no patches", "an empty list", "several empty lists"]


@pytest.fixture(scope="module")
def processes(comfy: ComfyInstall) -> Iterator[Ranks]:
    """That have ComfyUI and our pack imported."""
    scenes = ("vae_scenes", "together_scenes", "residence_scenes", "sampler_scenes")
    modules = [f"tests.comfyui.{name}" for name in scenes]
    ranks = Ranks(comfy.python, modules, {"COMFYUI_PATH": str(comfy.root)})
    yield ranks
    ranks.close()


@pytest.fixture
def alone(processes: Ranks) -> Group:
    return Group(processes, 1)


@pytest.fixture
def two(processes: Ranks) -> Group:
    return Group(processes, 2)


@pytest.mark.parametrize("how", ["copy", "deepcopy"])
def test_a_copy_of_a_cp_vae_is_one(alone: Group, how: str) -> None:
    (made,) = alone.run(f"{VAE}copies", how=how)
    assert made["kind"] == ["DividedVAE", "RemoteVAE"]
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
    (told,) = alone.run(f"{SAMPLER}like_later", native="LaterKSampler")
    given = told["input"]
    assert list(given["required"])[-2:] == ["denoise", "eta"]
    assert given["required"]["eta"] == ["FLOAT", {"default": 0.5, "step": 0.01, "advanced": True}]
    assert list(given["optional"]) == ["preview", "hint", "cp_config"]
    assert given["optional"]["preview"][0] == "COMBO"
    assert given["optional"]["preview"][1]["options"] == ["none", "small"]
    assert given["optional"]["hint"] == ["MASK", {}]
    (told,) = alone.run(f"{SAMPLER}like_later", native="LaterSamplerCustom")
    assert list(told["input"]["optional"]) == ["skip", "cp_config"]
    assert told["input"]["optional"]["skip"] == ["INT", {"default": 2, "max": 9, "tooltip": "Steps to skip."}]
    assert told["output_name"] == ["output", "denoised_output", "left"]
    assert told["output"] == ["LATENT", "LATENT", "SIGMAS"]


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


def test_where_a_network_may_keep_what_it_made_nothing_is_recorded(alone: Group) -> None:
    (kept,) = alone.run(f"{TOGETHER}reached", name="ar_state", kept=True)
    (given,) = alone.run(f"{TOGETHER}reached", name="sigmas", kept=False)
    assert (kept, given) == ("the network may keep something in ar_state", "")


def test_comfyui_and_the_page_let_models_go_at_once_and_the_workers_stay(alone: Group) -> None:
    (rounds,) = alone.run(f"{RESIDENCE}unloaded_by_both", times=2)
    for found in rounds:
        assert found["alive"], "a healthy group was ended"
        assert found["listed"] == []
        assert found["freed"] in ([], ["demo"], ["demo"] * 2), "whoever came first"


def test_a_group_whose_idle_time_ends_while_a_model_is_let_go_ends_afterwards(alone: Group) -> None:
    (found,) = alone.run(f"{RESIDENCE}idle_while_unloading")
    assert found == {"error": None, "alive meanwhile": True, "reason": "ended after 0.25 s without a run"}


def test_to_let_a_model_go_waits_for_no_group_that_is_started(alone: Group) -> None:
    (found,) = alone.run(f"{RESIDENCE}unloading_a_group_that_is_replaced")
    assert found["waited"] < 1
    assert found["starting"], "too late to tell"


def test_what_is_free_is_counted_each_time_and_not_when_the_workers_started(alone: Group) -> None:
    ((first, second, third),) = alone.run(f"{RESIDENCE}main_memory", times=3)
    assert second < 0.8 * first
    assert third < 0.9 * second
