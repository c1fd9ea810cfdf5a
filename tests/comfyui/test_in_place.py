"""A node has changed a MODEL's network in place: the workers sample with what it is now, or it is refused by name."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch

from .cases import DEGREES
from .client import Graph, NodeError
from .comfy import DEVICE
from .conditioning import text_of_unet
from .graphs import Job, Parallel, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_kin import link, node, on_the_loader

BAR = 2e-5  # of the latent's standard deviation
FLUX = Job(family="flux_dev", cfg=2.0, steps=3)
RING_2, PROMPTS = DEGREES["ring_2"], Parallel(cfg_degree=2)
_names = itertools.count(1)


def own_file(server: Server, source: str) -> str:
    """Returns a name of this file that no MODEL was loaded from yet."""
    folder = server.base / "models" / "diffusion_models"
    name = f"in_place_{next(_names)}.safetensors"
    (folder / name).symlink_to(folder / source)
    return name


def graph(
    file: str, kind: str, parallel: Parallel | None, *, unet: bool = False, by: str = "CPTestTampered", job: Job = FLUX
) -> Graph:
    """Samples the MODEL of a file after this change in place, by a node; "" for none."""
    made = sampling_graph(
        replace(FLUX, latent_seed=4) if unet else job, "CPSampler" if parallel else "KSampler", parallel
    )
    made["model"]["inputs"]["unet_name"] = file
    if unet:
        for text, tokens in ("positive", 7), ("negative", 9):
            made[text]["inputs"]["spec"] = json.dumps({"tokens": tokens, **text_of_unet("unet")})
        made["latent"]["inputs"]["shape"] = "1,4,24,32"
    if kind:
        made["changed"] = node(by, model=link("model"), kind=kind)
        made["sampler"]["inputs"]["model"] = link("changed")
    return made


@pytest.fixture(scope="module")
def unets(shared_server: Server) -> Server:
    shared_server.write_tiny("unet_files")
    return shared_server


@pytest.mark.parametrize(
    "parallel", [DEGREES["1_worker"], PROMPTS, replace(RING_2, ring_degree=0)], ids=["1", "prompts", "auto"]
)
def test_seamless_tiling_that_was_switched_on_in_place_tiles_and_is_gone_when_switched_off(
    unets: Server, parallel: Parallel
) -> None:
    file = own_file(unets, "unets/unet.safetensors")
    if parallel.ring_degree == 0 and not parallel.cfg_degree:
        parallel = Parallel(devices="cpu,cpu")
    plain = latent_of(unets.client.run(graph(file, "", parallel, unet=True)))
    tiled, want = (latent_of(unets.client.run(graph(file, "circular", each, unet=True))) for each in (parallel, None))
    assert apart(tiled, want) <= BAR
    assert apart(tiled, plain) > 0.1, "it does something"
    after = latent_of(unets.client.run(graph(file, "zeros", parallel, unet=True)))
    assert apart(after, plain) <= BAR


def test_seamless_tiling_is_refused_by_rows_with_the_way_out(unets: Server) -> None:
    file = own_file(unets, "unets/unet.safetensors")
    with pytest.raises(NodeError, match="padding_mode circular cannot be split"):
        unets.client.run(graph(file, "circular", RING_2, unet=True))


def test_a_list_in_place_of_a_tuple_of_the_same_numbers_is_no_change(unets: Server) -> None:
    file = own_file(unets, "unets/unet.safetensors")
    plain = latent_of(unets.client.run(graph(file, "", RING_2, unet=True)))
    assert torch.equal(latent_of(unets.client.run(graph(file, "a list", RING_2, unet=True))), plain)


@pytest.mark.parametrize("kind", ["eps", "theta", "latent format"])
def test_a_plain_value_that_was_changed_in_place_counts(unets: Server, kind: str) -> None:
    unet = kind == "eps"
    file = own_file(unets, "unets/unet.safetensors" if unet else "flux_dev.safetensors")
    plain = latent_of(unets.client.run(graph(file, "", RING_2, unet=unet)))
    changed, want = (latent_of(unets.client.run(graph(file, kind, each, unet=unet))) for each in (RING_2, None))
    assert apart(changed, want) <= BAR
    assert apart(changed, plain) > 1e-3, "it does something"


def test_a_plain_value_counts_where_the_loop_stays_in_comfyuis_process(server: Server) -> None:
    file = own_file(server, "flux_dev.safetensors")
    made = graph(file, "theta", None)
    want = latent_of(server.client.run(made))
    ours = on_the_loader(graph(file, "theta", None), FLUX, RING_2)
    ours["model"]["inputs"]["unet_name"] = file
    assert apart(latent_of(server.client.run(ours)), want) <= 1e-4


@pytest.mark.parametrize("weights", ["shard", "offload"])
def test_a_plain_value_counts_wherever_weights_are_and_with_a_lora(server: Server, weights: str) -> None:
    file = own_file(server, "flux_dev.safetensors")
    want, got = (
        latent_of(server.client.run(with_loras(graph(file, "theta", parallel), [("flux_dev.safetensors", 0.8)])))
        for parallel in (None, replace(RING_2, weights=weights))
    )
    assert apart(got, want) <= 1e-4


REFUSED = {
    "axes": "axes_dim = .* and .* gives",
    "weights": r"weights of this MODEL, the first single_blocks\.1\..* are not those",
    "one weight": r"1 weights of this MODEL, the first single_blocks\.1\.linear2\.bias, are not those",
    "columns": r"1 weights of this MODEL, the first single_blocks\.1\.linear1\.weight, are not those",
    "deleted": r"double_blocks\.[01] = None, and .* gives",
    "added": r"single_blocks\.2 = .*Identity, and .* gives None",
    "replaced": r"double_blocks\.0\.img_mlp",
}


@pytest.mark.parametrize("after", ["nothing", "a run"])
@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_network_whose_parts_or_weights_were_changed_in_place_is_refused_by_name(
    server: Server, kind: str, after: str
) -> None:
    if DEVICE != "cpu" and kind in ("weights", "one weight", "columns"):
        pytest.skip("dynamic VRAM maps files for reading: whoever writes to a weight ends ComfyUI")
    file, before = own_file(server, "flux_dev.safetensors"), server.children()
    if after == "a run":
        server.client.run(graph(file, "", RING_2))
        before = server.children()
    with pytest.raises(NodeError, match=rf"(?s)Refused: .*{REFUSED[kind]}.*Unload Models") as refused:
        server.client.run(graph(file, kind, RING_2))
    assert not re.search("changed on disk", str(refused.value))
    assert server.children() == before


def test_a_model_that_ksampler_has_put_a_lora_on_is_the_files_still(server: Server) -> None:
    file, loras = own_file(server, "flux_dev.safetensors"), [("flux_dev.safetensors", 0.8)]
    server.client.run(with_loras(graph(file, "", None), loras))
    want, got = (latent_of(server.client.run(graph(file, "", parallel))) for parallel in (None, RING_2))
    assert apart(got, want) <= 1e-4
    server.client.run(with_loras(graph(file, "", None), loras))
    assert torch.equal(latent_of(server.client.run(graph(file, "", RING_2))), got)


FILES = {"FLUX": "flux_dev.safetensors", "SDXL": "unets/unet.safetensors", "Wan": "wan_t2v.safetensors"}
CODE = ("method", "partial", "closure", "all_blocks", "attributes", "class", "other_attribute", "borrowed")
OBJECT_PATCHES = ("object patch: class", "object patch: function")


def code_graph(file: str, kind: str, parallel: Parallel | None, network: str) -> Graph:
    job = replace(FLUX, family="wan_t2v") if network == "Wan" else FLUX
    return graph(file, kind, parallel, unet=network == "SDXL", by="CPTestInPlace", job=job)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("network", list(FILES))
@pytest.mark.parametrize("kind", [*CODE, *OBJECT_PATCHES])
def test_code_of_a_pack_that_a_node_puts_onto_a_network_for_good_runs_in_the_workers(
    unets: Server, kind: str, network: str
) -> None:
    file, two = own_file(unets, FILES[network]), Parallel(devices="cpu,cpu", cfg_degree=2)
    plain = latent_of(unets.client.run(code_graph(file, "nothing", two, network)))
    want, since = latent_of(unets.client.run(code_graph(file, kind, None, network))), unets.log_size()
    got = latent_of(unets.client.run(code_graph(file, kind, two, network)))
    print(f"APART {apart(got, want):.1e}")
    assert apart(got, want) <= BAR
    assert apart(got, plain) > 100 * BAR, "it does something"
    assert "on 2 worker(s): sampled in" in unets.log(since)
    again = [code_graph(file, kind, parallel, network) for parallel in (None, two)]
    for one in again:
        one["sampler"]["inputs"]["seed"] += 1
    want, got = (latent_of(unets.client.run(one)) for one in again)
    assert apart(got, want) <= BAR, "of the same MODEL, once more"
    if kind in OBJECT_PATCHES:
        assert apart(latent_of(unets.client.run(code_graph(file, "nothing", two, network))), plain) <= BAR


@pytest.mark.parametrize("kind", ["unsendable", "made_class"])
def test_code_on_a_network_that_cannot_be_sent_is_sampled_by_comfyui_by_name(unets: Server, kind: str) -> None:
    file, two = own_file(unets, FILES["FLUX"]), Parallel(devices="cpu,cpu")
    want, since = latent_of(unets.client.run(code_graph(file, kind, None, "FLUX"))), unets.log_size()
    assert apart(latent_of(unets.client.run(code_graph(file, kind, two, "FLUX"))), want) <= BAR
    log = unets.log(since)
    what = {"unsendable": r"_unsendable\.\S*forward contains a _thread\.lock", "made_class": "Made"}[kind]
    assert re.search(rf"runs this MODEL in ComfyUI's process.*{what}", log)
    assert "worker(s): sampled in" not in log
