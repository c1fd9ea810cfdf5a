"""MODELs and CLIPs of packs' loaders, which do not say where they come from: the workers call the node of the prompt
again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..zoo.encoder_options import OPTIONS
from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Parallel, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_clip import ENCODED, LAYER, LORA, NATIVELY, ONE, PROMPT, clips, encoded_alike, encoding, result
from .test_clip_stages import FETCHED, STAGED, limited
from .test_foreign import FLUX, plain
from .test_kin import link, node
from .test_packs import AUTO, SPLIT
from .vae_graphs import TWO

__all__ = ["clips"]  # a fixture
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


PLAIN = {"class_type": "CLIPTextEncode", "text": PROMPT}
CODED = {"flux": ("clip_l.codes,t5xxl.codes", "FLUX"), "stable audio": ("t5base.codes", "STABLE_AUDIO")}


@pytest.fixture
def coded(clips: Server) -> Server:
    """The server with text encoders in a format of the rig's own, which ComfyUI does not know."""
    if not (clips.base / "models" / "text_encoders" / "t5base.codes").exists():
        clips.client.run({"files": node("CPTestWriteCodes", files="clip_l,t5xxl,t5base")})
    return clips


def text(
    which: str, parallel: Parallel | bool, *steps: Graph, kind: str = "codes", graph: Graph | None = None
) -> Graph:
    graph, (files, encoder) = graph or encoding(which, parallel, *steps, **PLAIN), CODED[which]
    loader = node("CPTestPackClip", files=files, type=encoder, options=json.dumps(OPTIONS), kind=kind)
    graph["loader" if parallel else "clip"] = loader
    return graph


def both(server: Server, which: str, parallel: Parallel, *steps: Graph) -> torch.Tensor:
    return encoded_alike(server, text(which, False, *steps), text(which, parallel, *steps))


@pytest.mark.parametrize("parallel", [ONE, TWO], ids=["one worker", "two"])
def test_a_clip_of_a_packs_loader_is_encoded_in_the_workers_to_the_bit_also_with_a_lora(
    coded: Server, parallel: Parallel
) -> None:
    for which in CODED:
        plain = both(coded, which, parallel)
        assert not torch.equal(plain, result(coded, encoding(which, False, **PLAIN))), "its codes are not exact"
        lora = both(coded, which, parallel, LORA)
        assert not torch.equal(plain, lora)
        assert torch.equal(plain, both(coded, which, parallel)), "the LoRA is gone again"
    assert not torch.equal(both(coded, "flux", parallel, LORA, LAYER), plain)


@pytest.mark.parametrize(("mebibytes", "says"), [((7, 7), STAGED), ((9.9, 0.01), FETCHED)])
def test_its_parts_are_where_there_is_room_to_the_bit(coded: Server, mebibytes: tuple[float, float], says: str) -> None:
    with limited(coded, *mebibytes):
        since = coded.log_size()
        plain = both(coded, "flux", TWO)
        assert says in coded.log(since)
        assert not torch.equal(plain, both(coded, "flux", TWO, LORA))
        assert torch.equal(plain, both(coded, "flux", TWO)), "the LoRA is gone again"


@pytest.mark.parametrize("kind", ["dice", "host"])
def test_a_loader_that_gives_the_workers_no_such_clip_is_named_and_comfyui_encodes(coded: Server, kind: str) -> None:
    want, since = result(coded, text("flux", False, kind=kind)), coded.log_size()
    before = coded.workers()
    assert torch.equal(result(coded, text("flux", TWO, kind=kind)), want)
    log, says = coded.log(since), {"dice": "were changed in place", "host": "PackClip fails in a worker"}
    assert f"{NATIVELY}: " in log
    assert says[kind] in log
    assert ENCODED not in log
    assert not before or coded.workers() == before


@pytest.mark.parametrize(
    ("pack", "says"), [("cp_unimportable", "only in ComfyUI"), ("cp_fatal", "workers ended when they had it")]
)
def test_a_clips_loader_of_a_pack_that_no_worker_can_import_is_named_and_not_tried_again(
    clips: Server, pack: str, says: str
) -> None:
    def graph(parallel: Parallel | bool, words: str) -> Graph:
        made = encoding("sd1", parallel, class_type="CLIPTextEncode", text=words)
        made["loader" if parallel else "clip"] = node(
            f"CPTest {pack} clip", name="clip_l.safetensors", options=json.dumps(OPTIONS)
        )
        return made

    for words in ("a fox", "a wolf"):
        want, since, before = result(clips, graph(False, words)), clips.log_size(), clips.workers()
        assert torch.equal(result(clips, graph(TWO, words)), want)
        assert says in clips.log(since)
        assert NATIVELY in clips.log(since)
        assert words == "a fox" or clips.workers() == before


def test_weights_that_no_file_has_are_not_compared(clips: Server) -> None:
    """They are whatever was in memory: text alone needs no vision tower."""
    folder = clips.base / "models" / "text_encoders"
    whole = load_file(folder / "qwen25_7b.safetensors")
    part = {name: weight for name, weight in whole.items() if not name.startswith("visual.")}
    assert len(part) < len(whole)
    save_file(part, folder / "blind.safetensors")

    def encoded(parallel: Parallel | bool) -> Any:
        graph = encoding("qwen image", parallel, **PLAIN)
        graph["loader" if parallel else "clip"]["inputs"]["files"] = "blind.safetensors"
        return result(clips, graph)

    want, since = encoded(False), clips.log_size()
    assert torch.equal(encoded(TWO), want)
    assert ENCODED in clips.log(since)
