"""A later ComfyUI that reads one thing more off a MODEL, a condition or a latent, or whose networks do something new,
has somebody judge it (judged.py, judged_networks.json)."""

from __future__ import annotations

import ast

import pytest

from . import judged
from .comfy import ComfyInstall
from .judge import differences
from .names import missing_names, names_in
from .reads import keys, read_by

TABLES = ("MODEL_OPTIONS", "TRANSFORMER_OPTIONS", "CONDITION", "MODEL_CONDITION", "LATENT", "PATCHER", "GUIDER",
          "WRAPPERS", "CALLBACKS", "HOOKS", "TEXT_ENCODERS", "VAES")  # fmt: skip


@pytest.mark.parametrize("what", TABLES)
def test_everything_that_comfyui_reads_is_judged(comfy: ComfyInstall, what: str) -> None:
    assert read_by(comfy.root)[what] == getattr(judged, what).keys()


def test_every_name_of_comfyuis_that_we_use_is_there(comfy: ComfyInstall) -> None:
    assert missing_names(comfy.root) == []


def test_everything_that_networks_do_beside_their_blocks_is_judged(comfy: ComfyInstall) -> None:
    assert differences(comfy) == []


def test_a_name_is_seen_however_it_is_used() -> None:
    code = """
import comfy.sd, comfy.utils as short
from comfy.samplers import KSampler as Other
from comfy import sample
from .server import bind
comfy.model_management.free_memory(comfy.sd.__name__)
server.listen(short.load, sample.fix)
"""
    names = {"comfy.sd", "comfy.utils", "comfy.samplers.KSampler", "comfy.model_management.free_memory"}
    assert {*names_in(ast.parse(code))} == names | {"comfy.model_management", "comfy.sample", "comfy.sample.fix"}


def test_a_key_is_seen_however_it_is_read() -> None:
    code = """
d["item"]; d.get("get", 1); d.pop("pop"); d.setdefault("default", {}); "contains" in d; "lacks" not in d
self.d["of an object"]; f(y["d"]["nested"]); y.get("d", {})["got"]; d.copy()["copied"]; d[name]; e["another"]
get_models_from_cond(conds[k], "model")
"""
    read = {*keys(ast.parse(code))}
    assert ("cond", "model") in read
    assert {key for owner, key in read if owner == "d"} == {
        "item", "get", "pop", "default", "contains", "lacks", "of an object", "nested", "got", "copied"
    }  # fmt: skip
