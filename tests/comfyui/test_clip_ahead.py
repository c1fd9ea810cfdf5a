"""Several prompts of a CP CLIP in a real ComfyUI: encoded together, each on another worker, and while other nodes run;
to the bits of ComfyUI alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from .client import Graph, Interrupted, NodeError
from .graphs import Parallel
from .latents import saved_latents
from .server import Server
from .test_clip import ENCODED, LAYER, LORA, NATIVELY, ONE, clips, nonces, resident_of, with_clip
from .test_clip_stages import STAGED, limited
from .vae_graphs import THREE, TWO, node

__all__ = ["clips"]  # a fixture

WAITED = "[test] another node has waited"
UNDONE = "[CP] prompts were not encoded ahead"
TEXTS = ("a (red:1.4) fox", "blurred, [low quality] in the ((snow)) by a river of many words")


def prompts(which: str, parallel: Parallel | bool | None, *texts: Any, clip: str = "clip") -> Graph:
    """Encodes each text with a node of its own; `texts` are texts or links."""
    graph = with_clip(which, parallel)
    for number, text in enumerate(texts):
        graph[f"encode {number}"] = node("CLIPTextEncode", clip=[clip, 0], text=text)
    return graph | saves(len(texts))


def saves(number: int) -> Graph:
    return {
        f"save {each}": node("CPTestSaveEncoded", conditioning=[f"encode {each}", 0], name=f"ahead_{next(nonces)}")
        for each in range(number)
    }


def results(server: Server, graph: Graph) -> list[torch.Tensor]:
    saved = saved_latents(server.client.run(graph, timeout=300))
    return [saved[name] for name in sorted(saved)]


def fresh() -> list[str]:
    """Texts that no cache has."""
    return [f"{text} {next(nonces)}" for text in TEXTS]


def encodings(log: str) -> list[tuple[int, int]]:
    """Of each request the workers that computed, and the prompts."""
    found = re.findall(re.escape(ENCODED) + r" (\S+(?:, \S+)*) in \S+ s, loaded in \S+ s(?: \((\d+) prompts\))?", log)
    return [(len(devices.split(", ")), int(number or 1)) for devices, number in found]


def equal(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("which", ["sd1", "flux", "stable audio"])
def test_a_positive_and_a_negative_prompt_are_one_request_each_on_another_worker(clips: Server, which: str) -> None:
    texts = fresh()
    want, since = results(clips, prompts(which, False, *texts)), clips.log_size()
    assert equal(results(clips, prompts(which, TWO, *texts)), want)
    assert encodings(clips.log(since)) == [(2, 2)]
    assert NATIVELY not in clips.log(since)
    file = {"sd1": "clip_l", "flux": "clip_l", "stable audio": "t5base"}[which]
    ranks = clips.client.get("/cp/status")["ranks"]
    assert all(resident_of(rank, f"{file}.safetensors") for rank in ranks)


def test_one_worker_encodes_both_and_three_workers_five(clips: Server) -> None:
    for parallel, number, workers in ((ONE, 2, 1), (THREE, 5, 3)):
        texts = [f"{TEXTS[0]} {next(nonces)}" for _ in range(number)]
        want, since = results(clips, prompts("sd1", False, *texts)), clips.log_size()
        assert equal(results(clips, prompts("sd1", parallel, *texts)), want)
        assert encodings(clips.log(since)) == [(workers, number)]


def waiting(server: Server, graph: Graph, text: str = ENCODED, *, clip: str = "clip") -> Graph:
    """The graph with a node that takes the CLIP first, and waits until `text` has been logged once more."""
    times = server.log().count(text) + 1
    return graph | {"wait": node("CPTestUntilLogged", clip=[clip, 0], text=text, times=times)}


def test_prompts_are_encoded_while_another_node_runs_and_no_more_is_asked(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))  # the workers are there
    texts = fresh()
    want, since = results(clips, prompts("sd1", False, *texts)), clips.log_size()
    assert equal(results(clips, waiting(clips, prompts("sd1", TWO, *texts))), want)
    log = clips.log(since)
    assert encodings(log) == [(2, 2)]
    assert log.index(ENCODED) < log.index(WAITED)
    text = clips.client.get("/cp/status")["runs"][-1]
    assert {*dict(text["phases"])} == {"encoding"}


def test_prompts_of_a_clip_whose_workers_have_not_started_are_one_request_at_the_first_ask(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    since_event = clips.client.now()
    clips.workers()[0].kill()
    clips.client.wait(lambda event: event.kind == "cp.status" and event.data["state"] == "died", 30, since_event)
    texts = fresh()
    want, since = results(clips, prompts("sd1", False, *texts)), clips.log_size()
    assert equal(results(clips, prompts("sd1", TWO, *texts)), want)
    assert encodings(clips.log(since)) == [(2, 2)]


def test_a_prompt_that_is_cached_is_not_encoded_again(clips: Server) -> None:
    texts = fresh()
    graph = prompts("sd1", TWO, *texts)
    results(clips, graph)
    for number in (0, 1):
        graph[f"encode {number}"]["inputs"]["text"] = texts[number] = f"{texts[number]} again"
        since = clips.log_size()
        results(clips, graph | saves(2))
        assert encodings(clips.log(since)) == [(1, 1)]
    since = clips.log_size()
    got = results(clips, graph | saves(2))
    assert encodings(clips.log(since)) == []
    assert equal(got, results(clips, prompts("sd1", False, *texts)))


@pytest.mark.parametrize("step", [LAYER, LORA])
def test_with_a_skipped_layer_or_a_lora_prompts_are_encoded_ahead_or_at_the_first_ask(
    clips: Server, step: dict[str, Any]
) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    for ahead in (True, False):
        texts, graphs = fresh(), []
        for parallel in (False, TWO):
            graph = prompts("sd1", parallel, *texts, clip="step")
            graph["step"] = node(step["class_type"], clip=["clip", 0], **step["inputs"])
            graphs.append(graph)
        want, since = results(clips, graphs[0]), clips.log_size()
        assert equal(results(clips, waiting(clips, graphs[1], clip="step") if ahead else graphs[1]), want)
        assert encodings(clips.log(since)) == [(2, 2)]


def test_texts_of_a_list_and_of_other_nodes_are_one_request(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    graphs, texts = [], fresh()
    for parallel in (False, TWO):
        graph = prompts("sd1", parallel, ["list", 0], ["text", 0])
        graph["list"] = node("CPTestTexts", lines="\n".join([*texts, "a third one"]))
        graph["text"] = node("PrimitiveStringMultiline", value=texts[1])
        graphs.append(graph)
    want, since = results(clips, graphs[0]), clips.log_size()
    assert equal(results(clips, graphs[1]), want)
    assert sum(number for _, number in encodings(clips.log(since))) == 4
    assert encodings(clips.log(since))[0][1] >= 3


def test_encoders_of_two_texts_are_ahead_too(clips: Server) -> None:
    results(clips, prompts("sdxl", TWO, *fresh()))
    graphs, texts = [], fresh()
    size = {name: 512 for name in ("width", "height", "target_width", "target_height")} | {"crop_w": 0, "crop_h": 0}
    for parallel in (False, TWO):
        graph = with_clip("sdxl", parallel) | saves(2)
        for number in (0, 1):
            graph[f"encode {number}"] = node(
                "CLIPTextEncodeSDXL", clip=["clip", 0], text_g=texts[number], text_l=texts[1 - number], **size
            )
        graphs.append(graph)
    want, since = results(clips, graphs[0]), clips.log_size()
    assert equal(results(clips, waiting(clips, graphs[1])), want)
    assert encodings(clips.log(since)) == [(2, 2)]


def test_stages_encode_both_prompts_in_one_request(clips: Server) -> None:
    texts = fresh()
    want = results(clips, prompts("flux", False, *texts))
    with limited(clips, 7, 7):
        since = clips.log_size()
        assert equal(results(clips, prompts("flux", TWO, *texts)), want)
        assert STAGED in clips.log(since)
        assert [number for _, number in encodings(clips.log(since))] == [2]


def test_a_second_worker_gets_the_encoder_only_with_room_and_gives_it_up_without(clips: Server) -> None:
    texts, want = fresh(), {}
    want = results(clips, prompts("stable audio", False, *texts))
    with limited(clips, 30, 0.01):
        since = clips.log_size()
        assert equal(results(clips, prompts("stable audio", TWO, *texts)), want)
        assert encodings(clips.log(since)) == [(1, 2)]
        clips.client.post("/cp_test/environment", CP_MEMORY_GIB="0.03,0.03")
        texts, since = fresh(), clips.log_size()
        results(clips, prompts("stable audio", TWO, *texts))
        assert encodings(clips.log(since)) == [(2, 2)]
        clips.client.post("/cp_test/environment", CP_MEMORY_GIB="0.03,0.00001")
        texts, since = fresh(), clips.log_size()
        results(clips, prompts("stable audio", TWO, *texts))
        assert encodings(clips.log(since)) == [(1, 2)]


def test_an_encoder_that_shall_go_after_a_prompt_goes_once_for_those_encoded_ahead(clips: Server) -> None:
    unload = Parallel(**{**vars(TWO), "after_sampling": "unload"})
    results(clips, prompts("sd1", unload, *fresh()))
    texts = fresh()
    want, since = results(clips, prompts("sd1", False, *texts)), clips.log_size()
    assert equal(results(clips, waiting(clips, prompts("sd1", unload, *texts))), want)
    assert encodings(clips.log(since)) == [(2, 2)]
    assert clips.log(since).count("unloading the workers' model") == 1


LONG = f"({'fox ' * 20_000}:1.2)"  # takes seconds


def test_a_cancel_during_another_node_stops_the_encoding_and_the_workers_stay(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    before, since = clips.workers(), clips.client.now()
    prompt = clips.client.queue(waiting(clips, prompts("sd1", TWO, f"{LONG} {next(nonces)}"), text="never"))
    clips.client.wait(lambda event: event.kind == "cp.status" and event.data["state"] == "encoding", 60, since)
    clips.client.interrupt(prompt)
    with pytest.raises(Interrupted):
        clips.client.finish(prompt, since=since, timeout=30)
    clips.client.wait(lambda event: event.kind == "cp.status" and event.data["state"] == "cancelled", 30, since)
    texts = fresh()
    want = results(clips, prompts("sd1", False, *texts))
    assert equal(results(clips, prompts("sd1", TWO, *texts)), want)
    assert clips.workers() == before


def test_a_worker_killed_meanwhile_is_named_by_the_node_that_asks(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    since = clips.client.now()
    prompt = clips.client.queue(waiting(clips, prompts("sd1", TWO, f"{LONG} {next(nonces)}"), text=UNDONE))
    clips.client.wait(lambda event: event.kind == "cp.status" and event.data["state"] == "encoding", 60, since)
    clips.workers()[1].kill()
    with pytest.raises(NodeError, match=r"(?s)CLIPTextEncode.*rank 1 .*killed.*The next run starts fresh workers"):
        clips.client.finish(prompt, since=since, timeout=60)
    texts = fresh()
    want = results(clips, prompts("sd1", False, *texts))
    assert equal(results(clips, prompts("sd1", TWO, *texts)), want)


def test_an_error_of_another_node_ends_an_encoding_that_nobody_will_ask_for(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    since, at = clips.client.now(), clips.log_size()
    with pytest.raises(NodeError, match="it shall fail"):
        clips.client.run(waiting(clips, prompts("sd1", TWO, f"{LONG} {next(nonces)}"), text=""), timeout=60)
    clips.client.wait(lambda event: event.kind == "cp.status" and event.data["state"] == "cancelled", 30, since)
    assert UNDONE in clips.log(at)
    assert ENCODED not in clips.log(at)


def test_a_clip_that_changes_after_its_prompts_were_encoded_ahead_is_encoded_by_comfyui(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    texts, graphs, spaces = fresh(), [], " " * next(nonces)
    for parallel in (False, TWO):
        graph = prompts("sd1", parallel, *texts)
        graph["loader" if parallel else "clip"]["inputs"]["options"] += spaces  # loads a CLIP of its own
        graphs.append(graph)
    unchanged, since = results(clips, graphs[0]), clips.log_size()
    graphs[0]["clip"]["inputs"]["options"] += " "
    change = node("CPTestUntilLogged", clip=["clip", 0], text=ENCODED, times=0, then="a column")
    want = results(clips, graphs[0] | saves(2) | {"wait": change})
    assert not equal(want, unchanged)
    graph = waiting(clips, graphs[1])
    graph["wait"]["inputs"]["then"] = "a column"
    assert equal(results(clips, graph), want)
    log = clips.log(since)
    assert log.index(ENCODED) < log.index(NATIVELY)


def test_two_queued_workflows_each_have_their_own_prompts(clips: Server) -> None:
    results(clips, prompts("sd1", TWO, *fresh()))
    texts = [fresh(), fresh()]
    want = [results(clips, prompts("sd1", False, *each)) for each in texts]
    since, now = clips.log_size(), clips.client.now()
    queued = [clips.client.queue(prompts("sd1", TWO, *each)) for each in texts]
    for prompt, expected in zip(queued, want, strict=True):
        saved = saved_latents(clips.client.finish(prompt, since=now, timeout=120))
        assert equal([saved[name] for name in sorted(saved)], expected)
    assert encodings(clips.log(since)) == [(2, 2), (2, 2)]
