"""MODELs of packs' loaders, which do not say where they come from: the workers call the node of the prompt again."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Parallel, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_foreign import FLUX, plain
from .test_kin import link, node
from .test_packs import AUTO, SPLIT

BAR = 1e-5  # of the latent's standard deviation
LOADER, FILE = "CPTestPackLoader", "packed.safetensors"


@pytest.fixture
def packed(server: Server) -> Server:
    """The server with a file whose weights have the pack's own names."""
    folder = server.base / "models" / "diffusion_models"
    if not (folder / FILE).exists():
        weights = load_file(folder / f"{FLUX.family}.safetensors")
        save_file({f"packed.{name}": weight for name, weight in weights.items()}, folder / FILE)
    return server


def picture(kind: str, parallel: Parallel | None, *, lora: bool = False, loader: str = LOADER) -> Graph:
    graph = plain(FLUX, parallel)
    inputs = {"name": FILE, "kind": kind} if loader == LOADER else {"name": f"{FLUX.family}.safetensors"}
    graph["model"] = node(loader, **inputs)
    if kind == "pipe":
        graph["pipe"] = node("CPTestFromPipe", pipe=link("model", 1))
        graph["sampler"]["inputs"]["model"] = link("pipe")
    return with_loras(graph, [("flux_dev.safetensors", 0.8)] if lora else [])


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize(
    ("kind", "parallel"), [("names", SPLIT), ("pipe", SPLIT), ("patcher", SPLIT), ("layers", AUTO)], ids=str
)
def test_it_is_ksamplers_latent(packed: Server, kind: str, parallel: Parallel, lora: bool) -> None:
    """Also while ComfyUI has the MODEL loaded, with the LoRA in its weights."""
    want = latent_of(packed.client.run(picture(kind, None, lora=lora)))
    got = latent_of(packed.client.run(picture(kind, parallel, lora=lora)))
    print(f"APART {kind} {apart(got, want):.1e}")
    assert apart(got, want) <= BAR
    degrees = packed.client.get("/cp/status")["degrees"]
    assert degrees["ring_degree"] * degrees["ulysses_degree"] == (1 if kind == "layers" else 2)


def test_a_model_of_comfyuis_loader_whose_name_a_pack_has_dropped_is_loaded_by_its_node(server: Server) -> None:
    graphs = [plain(FLUX, parallel) for parallel in (None, SPLIT)]
    for graph in graphs:
        graph["changed"] = node("CPTestForeignWrapper", model=link("model"), kind="no_file")
        graph["sampler"]["inputs"]["model"] = link("changed")
    want, got = (latent_of(server.client.run(graph)) for graph in graphs)
    assert apart(got, want) <= BAR


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("dice", "loader .*PackLoader makes in a worker is not this MODEL"),
        ("host", r"loader .*PackLoader fails in a worker \(RuntimeError: only in ComfyUI\)"),
    ],
)
def test_a_loader_that_gives_the_workers_no_such_model_is_named(packed: Server, kind: str, says: str) -> None:
    with pytest.raises(NodeError, match=f"Refused: .*{says}.*ComfyUI's own sampler node"):
        packed.client.run(picture(kind, SPLIT))
    assert packed.workers(), "a refusal ends no worker"


@pytest.mark.parametrize("changed", ["theta", "latent format"])
def test_a_plain_value_that_was_changed_in_place_since_counts(packed: Server, changed: str) -> None:
    def sampled(parallel: Parallel | None) -> Tensor:
        graph = picture(f"names, {changed}", parallel)
        graph["changed"] = node("CPTestTampered", model=link("model"), kind=changed)
        graph["sampler"]["inputs"]["model"] = link("changed")
        return latent_of(packed.client.run(graph))

    want = sampled(None)
    assert apart(sampled(SPLIT), want) <= BAR
    assert apart(latent_of(packed.client.run(picture("names", None))), want) > 1e-3


def test_a_network_that_was_changed_in_place_since_is_named(packed: Server) -> None:
    graph = picture("names", SPLIT)
    graph["model"]["inputs"]["kind"] = "names, for a MODEL of its own"
    graph["changed"] = node("CPTestTampered", model=link("model"), kind="one weight")
    graph["sampler"]["inputs"]["model"] = link("changed")
    with pytest.raises(NodeError, match="is not this MODEL: a node has changed its network since"):
        packed.client.run(graph)


def test_a_loader_that_gets_an_input_from_another_node_is_refused_before_a_worker_starts(packed: Server) -> None:
    graph = picture("names", SPLIT)
    graph["text"] = node("CPTestWord", text=FILE)
    graph["model"]["inputs"]["name"] = link("text")
    before = packed.children()
    with pytest.raises(NodeError, match=f"Refused: the loader {LOADER}.*gets its name from another node.*set name on"):
        packed.client.run(graph)
    assert packed.children() == before


def test_a_loader_of_a_pack_that_no_worker_can_import_is_named_and_not_tried_again(server: Server) -> None:
    graph = picture("", SPLIT, loader="CPTest cp_unimportable loader")
    for _ in range(2):
        with pytest.raises(NodeError, match=r"cp_unimportable cannot be imported in a worker \(RuntimeError: only in"):
            server.client.run(graph)


def test_the_files_that_its_inputs_name_must_stay_as_they_were(packed: Server) -> None:
    path = Path(packed.base / "models" / "diffusion_models" / "changing.safetensors")
    weights = load_file(path.with_name(FILE))
    save_file(weights, path)
    graph = picture("names", DEGREES["ring_2"])
    graph["model"]["inputs"]["name"] = path.name
    packed.client.run(graph)
    save_file({name: weight * 1.01 for name, weight in weights.items()}, path)
    graph["sampler"]["inputs"]["seed"] = 99
    with pytest.raises(NodeError, match=r"changing.safetensors changed on disk after this MODEL was loaded"):
        packed.client.run(graph)
