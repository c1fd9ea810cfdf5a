"""CP CLIP in a real ComfyUI: the same conditioning as without it, to the bit, for every node that takes a CLIP."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ..zoo.encoder_options import OPTIONS
from .client import Graph, Interrupted, NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import latent_of, saved_latents
from .server import Server, running_server
from .vae_graphs import THREE, TWO, in_workers, node

ENCODED = "[CP] text encoded on"
NATIVELY = "[CP] CP CLIP encodes in ComfyUI's process"
PROMPT = "a (red:1.4) fox, [blurred] in the ((snow)) by a river"
CLIPS = {
    "sd1": ("clip_l", "STABLE_DIFFUSION"),
    "refiner": ("clip_g", "STABLE_DIFFUSION"),
    "sdxl": ("clip_l,clip_g", "STABLE_DIFFUSION"),
    "stable audio": ("t5base", "STABLE_AUDIO"),
    "flux": ("clip_l,t5xxl", "FLUX"),
    "flux in fp8": ("clip_l,t5xxl_fp8", "FLUX"),
    "flux in scaled fp8": ("clip_l,t5xxl_scaled", "FLUX"),
    "qwen image": ("qwen25_7b", "QWEN_IMAGE"),
    "z image": ("qwen3_4b", "STABLE_DIFFUSION"),
}
BY_TEXT = [which for which in CLIPS if which != "z image"]  # whose vocabulary is too small
ONE = Parallel(ring_degree=1, ulysses_degree=1, devices="cpu")
nonces = itertools.count(1)


@pytest.fixture
def clips(server: Server) -> Server:
    """The server with files of tiny text encoders in its folders."""
    server.write_tiny("text_encoders")
    return server


def with_clip(which: str, parallel: Parallel | bool | None) -> Graph:
    """`parallel` False: without CP CLIP; None: CP CLIP without a cp_config."""
    names, kind = CLIPS[which]
    files = ",".join(f"{name}.safetensors" for name in names.split(","))
    loader = node("CPTestLoadClip", files=files, type=kind, options=json.dumps(OPTIONS))
    return in_workers("clip", loader, parallel)


def encoding(which: str, parallel: Parallel | bool | None, *steps: dict[str, Any], **encoder: Any) -> Graph:
    """Encodes a prompt with the CLIP after these `steps`, each a node that takes a CLIP and gives one."""
    graph, last = with_clip(which, parallel), "clip"
    for number, step in enumerate(steps):
        inputs = {name: value for name, value in step["inputs"].items()}
        graph[f"step {number}"] = {**step, "inputs": {"clip": [last, 0], **inputs}}
        last = f"step {number}"
    encoder = encoder or {"class_type": "CLIPTextEncode", "text": f"{PROMPT} {next(nonces)}"}
    graph["encode"] = node(encoder.pop("class_type"), clip=[last, 0], **encoder)
    graph["save"] = node("CPTestSaveEncoded", conditioning=["encode", 0], name=f"encoded_{next(nonces)}")
    return graph


def result(server: Server, graph: Graph) -> torch.Tensor:
    return saved_latents(server.client.run(graph, timeout=300))["save"]


def both(server: Server, which: str, parallel: Parallel | None, *steps: dict[str, Any], **encoder: Any) -> torch.Tensor:
    """What ComfyUI alone and CP CLIP make is equal to the bit; the workers did it."""
    encoder = encoder or {"class_type": "CLIPTextEncode", "text": PROMPT}
    return encoded_alike(server, *(encoding(which, each, *steps, **encoder) for each in (False, parallel)))


def encoded_alike(server: Server, native: Graph, ours: Graph) -> torch.Tensor:
    """What both graphs make, the second one in the workers, is equal to the bit."""
    want, since = result(server, native), server.log_size()
    got = result(server, ours)
    log = server.log(since)
    assert ENCODED in log, "the workers were not asked"
    assert NATIVELY not in log
    assert torch.isfinite(want).all()
    assert torch.equal(got, want)
    return want


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("which", BY_TEXT)
def test_a_prompt_with_weights_is_encoded_to_the_same_bits(clips: Server, which: str) -> None:
    both(clips, which, TWO)


def test_an_embedding_goes_with_the_prompt(clips: Server) -> None:
    with_it = both(clips, "sd1", TWO, class_type="CLIPTextEncode", text="a (embedding:fox:1.2) in the snow")
    assert not torch.equal(with_it, both(clips, "sd1", TWO, class_type="CLIPTextEncode", text="a in the snow"))


def test_a_sampler_and_a_prompt_share_the_workers_and_none_is_loaded_twice(clips: Server) -> None:
    def sampled() -> torch.Tensor:
        return latent_of(clips.client.run(sampling_graph(Job(family="flux_dev"), "CPSampler", TWO)))

    both(clips, "flux", TWO)
    want, before, since = sampled(), clips.workers(), clips.log_size()
    both(clips, "flux", TWO, class_type="CLIPTextEncode", text="another prompt")
    assert torch.equal(sampled(), want)
    assert "loaded in 0.0" in clips.log(since)
    assert clips.workers() == before
    text, run = clips.client.get("/cp/status")["runs"][-2:]
    assert ({*dict(text["phases"])}, text["steps"]) == ({"encoding"}, 0)
    assert "encoding" not in dict(run["phases"]), "each is a row of its own"


@pytest.fixture(scope="module")
def unequal(comfy: ComfyInstall) -> Iterator[Server]:
    """The second of two workers has room for a tiny text encoder, the first has none."""
    with running_server(comfy, env={"CP_MEMORY_GIB": "0.001,0.018"}) as server:
        server.write_tiny("text_encoders")
        yield server


def test_the_worker_with_the_most_room_encodes_generates_and_is_cancelled(unequal: Server) -> None:
    both(unequal, "stable audio", TWO)
    ranks = unequal.client.get("/cp/status")["ranks"]
    assert [resident_of(rank, "t5base.safetensors") > 0 for rank in ranks] == [False, True]
    assert torch.equal(result(unequal, generating("z image", TWO, 9)), result(unequal, generating("z image", False, 9)))
    before = unequal.workers()
    cancel_in_the_middle(unequal)
    both(unequal, "stable audio", TWO)
    assert unequal.workers() == before


def test_an_encoder_that_fits_nowhere_is_encoded_by_comfyui_with_both_sizes_in_the_log(unequal: Server) -> None:
    since = unequal.log_size()
    result(unequal, encoding("qwen image", TWO))
    log = unequal.log(since)
    assert "no worker may use more than 18.4 MiB of its device (CP_MEMORY_GIB says so)" in log
    assert ENCODED not in log


def test_one_worker_and_three_encode_the_same_bits(clips: Server) -> None:
    both(clips, "sdxl", THREE)
    both(clips, "sdxl", ONE)


def test_without_a_config_it_uses_the_workers_that_are_there(clips: Server) -> None:
    both(clips, "sd1", TWO)
    before = clips.workers()
    both(clips, "flux", None)
    assert clips.workers() == before


LORA = node("CPTestClipLora", strength=0.8, seed=3)
LAYER = node("CLIPSetLastLayer", stop_at_clip_layer=-2)


def test_a_lora_and_a_skipped_layer_after_cp_clip_are_honoured(clips: Server) -> None:
    plain = both(clips, "sd1", TWO)
    with_lora = both(clips, "sd1", TWO, LORA)
    assert not torch.equal(plain, with_lora)
    assert not torch.equal(with_lora, both(clips, "sd1", TWO, LORA, LAYER))
    assert torch.equal(plain, both(clips, "sd1", TWO)), "the LoRA is gone again"


@pytest.mark.sweep
def test_a_lora_before_cp_clip_is_honoured_for_every_format_of_file(clips: Server) -> None:
    for which in ("refiner", "stable audio", "flux"):
        graph = encoding(which, TWO, LORA, class_type="CLIPTextEncode", text=PROMPT)
        graph["step 0"]["inputs"]["clip"], graph["clip"]["inputs"]["clip"] = ["loader", 0], ["step 0", 0]
        graph["encode"]["inputs"]["clip"] = ["clip", 0]
        native = encoding(which, False, LORA, class_type="CLIPTextEncode", text=PROMPT)
        since = clips.log_size()
        assert torch.equal(result(clips, graph), result(clips, native))
        assert ENCODED in clips.log(since)


def test_a_clip_is_saved_with_its_lora_by_comfyui(clips: Server) -> None:
    both(clips, "sd1", TWO)
    saved = []
    for parallel in (False, TWO):
        graph = encoding("sd1", parallel, LORA)
        prefix = f"saved_{next(nonces)}"
        graph["file"] = node("CLIPSave", clip=["step 0", 0], filename_prefix=prefix)
        result(clips, graph)
        (path,) = (clips.base / "output").glob(f"{prefix}*.safetensors")
        saved.append(load_file(path))
    native, ours = saved
    assert native.keys() == ours.keys()
    assert all(torch.equal(native[name], ours[name]) for name in native)


def hooked(which: str, parallel: Parallel | bool, *, scheduled: bool) -> Graph:
    """A LoRA as a hook, which a schedule changes between 0.2 and 0.6 of a run."""
    graph = encoding(which, parallel, class_type="CLIPTextEncode", text=PROMPT)
    graph["hook"] = node("CPTestClipHook", clip=["clip", 0], strength=0.8, seed=3)
    graph["keyframes"] = node(
        "CreateHookKeyframesInterpolated", strength_start=1.0, strength_end=0.3, interpolation="linear",
        start_percent=0.2, end_percent=0.6, keyframes_count=3, print_keyframes=False,
    )  # fmt: skip
    graph["scheduled"] = node("SetHookKeyframes", hooks=["hook", 0], hook_kf=["keyframes", 0])
    graph["with hooks"] = node(
        "SetClipHooks", clip=["clip", 0], hooks=["scheduled", 0], apply_to_conds=True, schedule_clip=scheduled
    )
    graph["encode"]["inputs"]["clip"] = ["with hooks", 0]
    return graph


@pytest.mark.parametrize("scheduled", [True, False])
def test_hooks_change_the_text_encoder_as_in_comfyui(clips: Server, scheduled: bool) -> None:
    want = result(clips, hooked("sd1", False, scheduled=scheduled))
    since = clips.log_size()
    assert torch.equal(result(clips, hooked("sd1", TWO, scheduled=scheduled)), want)
    assert clips.log(since).count(ENCODED) == (4 if scheduled else 1)
    both(clips, "sd1", TWO)  # the hooks are off again


def test_images_reach_a_vision_encoder(clips: Server) -> None:
    def edit(parallel: Parallel | bool, seed: int) -> torch.Tensor:
        graph = encoding("qwen image", parallel, class_type="TextEncodeQwenImageEdit", prompt=PROMPT)
        graph["image"] = node("CPTestPictures", shape="1,64,96,3", seed=seed, nonce=1)
        graph["encode"]["inputs"]["image"] = ["image", 0]
        return result(clips, graph)

    want, since = edit(False, 1), clips.log_size()
    assert torch.equal(edit(TWO, 1), want)
    assert ENCODED in clips.log(since)
    assert not torch.equal(edit(TWO, 2), want)


FEW_TOKENS = json.dumps({"qwen3_4b": [[[number, 1.0] for number in (5, 77, 12, 300)]]})


def generating(which: str, parallel: Parallel | bool, length: int, text: str = FEW_TOKENS) -> Graph:
    return encoding(which, parallel, class_type="CPTestGenerate", text=text, length=length, nonce=next(nonces))


def test_text_is_generated_in_the_workers_with_its_progress(clips: Server) -> None:
    length = 40
    want, since, at = result(clips, generating("z image", False, length)), clips.log_size(), clips.client.now()
    assert torch.equal(result(clips, generating("z image", TWO, length)), want)
    assert ENCODED in clips.log(since)
    shown = [event.data for event in clips.client.events(at) if event.kind == "progress"]
    assert length in [data["value"] for data in shown if data["max"] == length]


@pytest.mark.sweep
def test_an_encoder_that_generates_no_text_gives_comfyuis_own_error(clips: Server) -> None:
    since = clips.log_size()
    with pytest.raises(NodeError, match="generate"):
        result(clips, generating("sd1", TWO, 5, "a fox"))
    assert "generates no text" in clips.log(since)


def test_a_prompt_is_cancelled_in_its_middle_and_the_workers_stay(clips: Server) -> None:
    want, before = result(clips, generating("z image", TWO, 9)), clips.workers()
    cancel_in_the_middle(clips)
    assert torch.equal(result(clips, generating("z image", TWO, 9)), want)
    assert clips.workers() == before


def cancel_in_the_middle(server: Server) -> None:
    since, prompt = server.client.now(), server.client.queue(generating("z image", TWO, 200_000))
    server.client.wait(lambda event: event.kind == "progress" and event.data["max"] == 200_000, 120, since)
    server.client.interrupt(prompt)
    asked_at = time.monotonic()
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since, timeout=60)
    assert time.monotonic() - asked_at < 10


def test_a_killed_worker_is_named_and_the_next_prompt_is_encoded(clips: Server) -> None:
    since = clips.client.now()
    prompt = clips.client.queue(generating("z image", TWO, 200_000))
    clips.client.wait(lambda event: event.kind == "progress" and event.data["max"] == 200_000, 120, since)
    clips.workers()[0].kill()
    with pytest.raises(NodeError, match=r"(?s)rank 0 .*was killed by SIGKILL\. The next run starts fresh workers"):
        clips.client.finish(prompt, since=since, timeout=30)
    both(clips, "sd1", TWO)


def test_a_clip_that_holds_foreign_things_is_encoded_by_comfyui_and_one_without_a_name_is_loaded_by_its_node(
    clips: Server,
) -> None:
    native = result(clips, encoding("sd1", False, class_type="CLIPTextEncode", text=PROMPT))
    for how, says in (("nameless", ENCODED), ("injected", "injections")):
        graph = encoding("sd1", TWO, node("CPTestChangeClip", how=how), class_type="CLIPTextEncode", text=PROMPT)
        if how == "nameless":  # before CP CLIP
            graph["step 0"]["inputs"]["clip"], graph["clip"]["inputs"]["clip"] = ["loader", 0], ["step 0", 0]
            graph["encode"]["inputs"]["clip"] = ["clip", 0]
        since = clips.log_size()
        assert torch.equal(result(clips, graph), native)
        log = clips.log(since)
        assert says in log
        assert (NATIVELY in log, ENCODED in log) == ((False, True) if how == "nameless" else (True, False))


def test_tokens_of_another_text_encoder_give_comfyuis_own_error_and_workers_stay(clips: Server) -> None:
    both(clips, "sd1", TWO)
    before, since = clips.workers(), clips.log_size()
    graph = encoding("sd1", TWO, class_type="CPTestEncodeTokens", tokens=json.dumps({"g": [[[49406, 1.0]]]}))
    with pytest.raises(NodeError, match="KeyError"):
        clips.client.run(graph, timeout=300)
    assert "raised an error in a worker: KeyError('l')" in clips.log(since)
    assert clips.workers() == before


def test_no_clip_is_refused_in_one_sentence(clips: Server) -> None:
    graph = with_clip("sd1", TWO)
    graph["loader"] = node("CPTestNoClip")
    graph["encode"] = node("CLIPTextEncode", clip=["clip", 0], text=PROMPT)
    graph["save"] = node("CPTestSaveEncoded", conditioning=["encode", 0], name="none")
    with pytest.raises(NodeError, match="was given None instead of a CLIP"):
        clips.client.run(graph, timeout=300)


@pytest.mark.sweep
def test_a_changed_file_is_said_and_encoded_by_comfyui(clips: Server) -> None:
    both(clips, "refiner", TWO)
    clips.client.post("/cp/free")
    path, since = clips.base / "models" / "text_encoders" / "clip_g.safetensors", clips.log_size()
    os.utime(path)
    result(clips, encoding("refiner", TWO))
    assert "changed on disk" in clips.log(since)
    assert ENCODED not in clips.log(since)
    assert clips.client.get("/cp/status")["state"] != "died"


def test_free_drops_the_text_encoder_and_the_next_prompt_loads_it_again(clips: Server) -> None:
    both(clips, "sd1", TWO)
    assert "clip_l.safetensors" in clips.client.post("/cp/free")["freed"]
    both(clips, "sd1", TWO)


@pytest.mark.parametrize(("policy", "says"), [("unload", "unloading"), ("offload", "offloading")])
def test_after_a_prompt_the_encoder_stays_or_goes_as_asked(clips: Server, policy: str, says: str) -> None:
    parallel, since = Parallel(**{**vars(TWO), "after_sampling": policy}), clips.log_size()
    for _ in range(2):
        both(clips, "sd1", parallel)
    assert clips.log(since).count(f"{says} the workers' model") == 2


def test_one_worker_has_the_weights_of_an_encoder(clips: Server) -> None:
    both(clips, "stable audio", TWO)
    ranks = clips.client.get("/cp/status")["ranks"]
    assert sorted(resident_of(rank, "t5base.safetensors") > 0 for rank in ranks) == [False, True]


def resident_of(rank: dict[str, Any], model: str) -> int:
    return sum(weights["resident"] for weights in rank["weights"] if weights["model"] == model)
