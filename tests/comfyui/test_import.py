"""Our pack in ComfyUI: its nodes are there, and none of them, nor a worker of theirs, needs diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest

from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import SITE, Server, running_server

OUR_NODES = {"CPParallelConfig", "CPSampler"}

NO_DIFFUSERS = '''
import importlib.machinery, importlib.util, sys

class WithoutDiffusers(importlib.machinery.PathFinder):
    """Finds modules and installed distributions as ever, but for diffusers."""
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "diffusers":
            raise ModuleNotFoundError("diffusers is asked for", name="diffusers")
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *context):
        found = importlib.machinery.PathFinder.find_distributions(*context)
        return (d for d in found if (d.metadata["Name"] or "").lower() != "diffusers")

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = WithoutDiffusers
ours = importlib.util.spec_from_file_location("tiny_files", "SITE/sitecustomize.py")
ours.loader.exec_module(importlib.util.module_from_spec(ours))
'''


def test_comfyui_offers_our_nodes(server: Server) -> None:
    assert set(server.client.get("/object_info")) >= OUR_NODES
    assert "IMPORT FAILED" not in server.log()


def test_the_demo_model_takes_no_users_models_place(server: Server) -> None:
    nodes = server.client.get("/object_info")
    for loader in ("UNETLoader", "CPLoadDiffusionModel"):
        listed = nodes[loader]["input"]["required"]["unet_name"]
        names = listed[0] if isinstance(listed[0], list) else listed[1]["options"]
        assert "flux_dev.safetensors" in names
        assert [name for name in names if "demo" in name] == []
    assert nodes["CPDemoModel"]["output"] == ["MODEL"]


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


@pytest.mark.sweep  # tests/test_architecture.py reads it off the imports
def test_without_diffusers_the_workers_give_ksamplers_latent(comfy: ComfyInstall, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_DIFFUSERS.replace("SITE", SITE))
    job = Job(family="flux_dev")
    with running_server(comfy, env={"PYTHONPATH": str(tmp_path)}) as server:
        native = latent_of(server.client.run(sampling_graph(job, "KSampler")))
        ours = latent_of(server.client.run(sampling_graph(job, "CPSampler", Parallel(ring_degree=2))))
        assert apart(ours, native) <= 1e-4
        assert "IMPORT FAILED" not in server.log()
