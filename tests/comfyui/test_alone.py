"""Our nodes' code in ComfyUI's python, without a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..engine.conftest import Group, Ranks
from .comfy import ComfyInstall


@pytest.fixture(scope="module")
def alone(comfy: ComfyInstall) -> Iterator[Group]:
    """One process that has ComfyUI and our pack imported."""
    modules = [f"tests.comfyui.{name}" for name in ("vae_scenes",)]
    process = Ranks(comfy.python, modules, {"COMFYUI_PATH": str(comfy.root)})
    yield Group(process, 1)
    process.close()


@pytest.mark.parametrize("how", ["copy", "deepcopy"])
def test_a_copy_of_a_cp_vae_is_one(alone: Group, how: str) -> None:
    (made,) = alone.run("tests.comfyui.vae_scenes:copies", how=how)
    assert made["kind"] == ["DividedVAE", "RemoteVAE"]
    assert made["shared"] == (how == "copy")
    assert made["one"], "what it asks is the VAE that it is a copy of"
    assert made["equal"]
    assert made["shape"] == made["expected"]


def test_a_cp_vae_says_what_it_has_also_while_it_is_made(alone: Group) -> None:
    """Python asks for these of an object that has no attributes yet."""
    names = ["decoder", "anything", "_vae", "__deepcopy__", "__setstate__", "__getstate_of_a_kind__"]
    (whole,) = alone.run("tests.comfyui.vae_scenes:answers", half_made=False, names=names)
    (half,) = alone.run("tests.comfyui.vae_scenes:answers", half_made=True, names=names)
    assert whole == {**dict.fromkeys(names, False), "decoder": True, "_vae": True}
    assert half == dict.fromkeys(names, False)
