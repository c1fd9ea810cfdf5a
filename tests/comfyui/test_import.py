"""A ComfyUI whose python lacks diffusers still starts with our pack, and its nodes say what to install."""

from __future__ import annotations

from pathlib import Path

import pytest

from .client import NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .server import Server, running_server

OUR_NODES = {"CPParallelConfig", "CPSampler"}

NO_DIFFUSERS = '''
import importlib.machinery, sys

class WithoutDiffusers(importlib.machinery.PathFinder):
    """Finds modules and installed distributions as ever, but for diffusers."""
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] == "diffusers" else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *context):
        found = importlib.machinery.PathFinder.find_distributions(*context)
        return (d for d in found if (d.metadata["Name"] or "").lower() != "diffusers")

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutDiffusers
'''


def test_comfyui_offers_our_nodes(server: Server) -> None:
    assert set(server.client.get("/object_info")) >= OUR_NODES
    assert "IMPORT FAILED" not in server.log()


def test_cp_sampler_takes_what_ksampler_takes_in_its_order(server: Server) -> None:
    nodes = server.client.get("/object_info")
    native, ours = nodes["KSampler"], nodes["CPSampler"]
    assert ours["input_order"]["required"] == native["input_order"]["required"]
    assert ours["input_order"]["optional"] == ["cp_config"]
    assert ours["output"] == native["output"] == ["LATENT"]
    for name in ("seed", "steps", "cfg", "denoise"):
        want, got = native["input"]["required"][name][1], ours["input"]["required"][name][1]
        assert {key: got.get(key) for key in ("default", "min", "max")} == {
            key: want.get(key) for key in ("default", "min", "max")
        }, name


def test_without_diffusers_comfyui_starts_and_the_node_says_what_to_install(
    comfy: ComfyInstall, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_DIFFUSERS)
    with running_server(comfy, env={"PYTHONPATH": str(tmp_path)}) as server:
        assert set(server.client.get("/object_info")) >= OUR_NODES
        with pytest.raises(NodeError, match=r"(?s)diffusers.*pip install"):
            server.client.run(sampling_graph(Job(family="flux_dev"), "CPSampler", Parallel()))
        assert server.children() == []
