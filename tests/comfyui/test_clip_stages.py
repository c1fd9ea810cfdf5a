"""A text encoder that fits on no single worker, in a real ComfyUI: in stages or fetched block by block, to the bits of
ComfyUI alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from .client import NodeError
from .graphs import Job, Parallel, sampling_graph
from .server import Server
from .test_clip import (
    ENCODED,
    LAYER,
    LORA,
    NATIVELY,
    PROMPT,
    both,
    cancel_in_the_middle,
    clips,
    encoding,
    generating,
    hooked,
    resident_of,
    result,
    with_clip,
)
from .vae_graphs import THREE, TWO, node

__all__ = ["clips"]  # a fixture

# Tokens with weights for a Qwen3 4B of three blocks of 9 MiB each, and an embedding of 6.
TOKENS = json.dumps({"qwen3_4b": [[[number, 1.0] for number in (5, 77, 12, 300, 41, 8)]]})
TOKENS_NODE = {"class_type": "CPTestEncodeTokens", "tokens": TOKENS}
STAGED = "the text encoder is in stages on workers"
FETCHED = "the text encoder's blocks are in main memory"


@contextmanager
def limited(server: Server, *mebibytes: float) -> Iterator[None]:
    """Each worker may take so much; none holds anything at the start, or at the end."""
    free(server)
    server.client.post("/cp_test/environment", CP_MEMORY_GIB=",".join(str(each / 1024) for each in mebibytes))
    try:
        yield
    finally:
        free(server)
        server.client.post("/cp_test/environment", CP_MEMORY_GIB=None)


def free(server: Server) -> None:
    with suppress(NodeError):  # there are no workers yet
        server.client.post("/cp/free")


def resident(server: Server, file: str) -> list[int]:
    return [resident_of(rank, file) for rank in server.client.get("/cp/status")["ranks"]]


@pytest.mark.parametrize(
    ("parallel", "mebibytes", "workers"), [(TWO, (20, 20), "0, 1"), (THREE, (9.5, 11, 20), "0, 1, 2")]
)
def test_stages_encode_the_same_bits_and_no_weight_is_on_two_workers(
    clips: Server, parallel: Parallel, mebibytes: tuple[float, ...], workers: str
) -> None:
    with limited(clips, *mebibytes):
        since = clips.log_size()
        both(clips, "z image", parallel, **TOKENS_NODE)
        assert f"{STAGED} {workers}" in clips.log(since)
        held = resident(clips, "qwen3_4b.safetensors")
        assert all(0 < size < limit * 2**20 for size, limit in zip(held, mebibytes, strict=True))
        file = clips.base / "models" / "text_encoders" / "qwen3_4b.safetensors"
        assert sum(held) < 1.05 * file.stat().st_size
        both(clips, "z image", parallel, LAYER, **TOKENS_NODE)


def test_two_encoders_of_one_clip_a_lora_and_hooks_are_in_stages(clips: Server) -> None:
    """Embeddings of 6 and 4 MiB in float16: the LoRA changes weights of both stages."""
    with limited(clips, 7, 7):
        since = clips.log_size()
        plain = both(clips, "flux", TWO)
        assert STAGED in clips.log(since)
        assert not torch.equal(plain, both(clips, "flux", TWO, LORA))
        assert torch.equal(plain, both(clips, "flux", TWO)), "the LoRA is gone again"
        want = result(clips, hooked("flux", False, scheduled=True))
        assert torch.equal(result(clips, hooked("flux", TWO, scheduled=True)), want)


def test_a_picture_reaches_a_vision_encoder_in_stages(clips: Server) -> None:
    def edit(parallel: Parallel | bool) -> torch.Tensor:
        graph = encoding("qwen image", parallel, class_type="TextEncodeQwenImageEdit", prompt=PROMPT)
        graph["image"] = node("CPTestPictures", shape="1,64,96,3", seed=1, nonce=1)
        graph["encode"]["inputs"]["image"] = ["image", 0]
        return result(clips, graph)

    want, whole = edit(False), (clips.base / "models/text_encoders/qwen25_7b.safetensors").stat().st_size / 2**20
    with limited(clips, 0.98 * whole, 0.5 * whole):
        since = clips.log_size()
        assert torch.equal(edit(TWO), want)
        assert STAGED in clips.log(since)


def test_blocks_are_fetched_where_one_worker_has_room_for_two_of_them(clips: Server) -> None:
    with limited(clips, 25, 0.01):
        since = clips.log_size()
        plain = both(clips, "z image", TWO, **TOKENS_NODE)
        assert FETCHED in clips.log(since)
        assert resident(clips, "qwen3_4b.safetensors")[0] < 1 << 20
        lora = both(clips, "z image", TWO, LORA, **TOKENS_NODE)
        assert not torch.equal(plain, lora)
        assert torch.equal(plain, both(clips, "z image", TWO, **TOKENS_NODE))


def test_an_encoder_in_stages_that_shall_generate_text_is_placed_anew(clips: Server) -> None:
    want = result(clips, generating("z image", False, 9))
    with limited(clips, 25, 20):
        both(clips, "z image", TWO, **TOKENS_NODE)
        since = clips.log_size()
        assert torch.equal(result(clips, generating("z image", TWO, 9)), want)
        assert FETCHED in clips.log(since)
        cancel_in_the_middle(clips)


def test_tokens_at_which_a_stage_fails_give_comfyuis_own_error_and_the_workers_stay(clips: Server) -> None:
    with limited(clips, 20, 20):
        both(clips, "z image", TWO, **TOKENS_NODE)
        before, since = clips.workers(), clips.log_size()
        graph = encoding("z image", TWO, class_type="CPTestEncodeTokens", tokens=json.dumps({"g": [[[5, 1.0]]]}))
        with pytest.raises(NodeError, match="KeyError"):
            clips.client.run(graph, timeout=300)
        log = clips.log(since)
        assert NATIVELY in log
        assert ENCODED not in log
        both(clips, "z image", TWO, **TOKENS_NODE)
        assert clips.workers() == before


def test_a_killed_stage_is_named_and_the_next_prompt_is_in_stages_again(clips: Server) -> None:
    long = json.dumps({"qwen3_4b": [[[number % 500, 1.0] for number in range(8000)]]})  # takes seconds
    with limited(clips, 20, 20):
        want, since = both(clips, "z image", TWO, **TOKENS_NODE), clips.client.now()
        prompt = clips.client.queue(encoding("z image", TWO, class_type="CPTestEncodeTokens", tokens=long))
        busy = ("loading", "sampling", "encoding")
        clips.client.wait(lambda event: event.kind == "cp.status" and event.data["state"] in busy, 60, since)
        time.sleep(0.5)
        clips.workers()[1].kill()
        with pytest.raises(NodeError, match=r"(?is)rank 1.*(SIGKILL|killed)"):
            clips.client.finish(prompt, since=since, timeout=60)
        at = clips.log_size()
        assert torch.equal(both(clips, "z image", TWO, **TOKENS_NODE), want)
        assert STAGED in clips.log(at)


@pytest.mark.parametrize(
    ("mebibytes", "with_it", "says"),
    [
        ((80, 80), True, r"whole on cpu, 3\d\.\d MiB\. The network's weights stay"),
        ((48, 48), True, r"in stages, .*: cpu \d+\.\d MiB, cpu \d+\.\d MiB\. The network's weights stay"),
        ((52, 45), False, r"as there is no CP CLIP\. With it: .*cpu"),
    ],
)
def test_the_plan_says_where_the_encoder_goes_beside_the_network(
    clips: Server, mebibytes: tuple[float, float], with_it: bool, says: str
) -> None:
    graph = sampling_graph(Job(family="flux_dev"), "CPSampler", TWO)
    graph |= {name: made for name, made in with_clip("z image", TWO if with_it else False).items() if name != "config"}
    graph["plan"] = node(
        "CPPlan", model=["model", 0], latent_image=["latent", 0], positive=["positive", 0], cp_config=["config", 0],
        cfg=1.0, clip=["clip", 0],
    )  # fmt: skip
    graph = {name: graph[name] for name in graph.keys() - {"sampler", "save", "negative"}}
    with limited(clips, *mebibytes):
        shown = clips.client.run(graph).outputs["plan"]
    assert re.search(f"Encoder: .*{says}", shown["text"][0]), shown["text"][0]
