"""Where the weights are at rest changes nothing in the picture: the same bits as with all of them on every worker."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel_runtime.specs import BLOCK_BUFFERS

from ..zoo import checkpoints
from .cases import DEGREES, FOUR
from .client import Graph, Interrupted, NodeError
from .comfy import ComfyInstall
from .conftest import VARIED
from .graphs import Job, Parallel, longer, sampling_graph, with_hooks, with_loras
from .latents import apart, latent_of
from .server import Server, running_server
from .test_compile import compiled
from .test_foreign import hooked
from .test_kin import node, on_the_loader
from .test_model_patches import Node, with_nodes
from .test_step_cache import JOBS, THRESHOLDS
from .test_wan_pair import pair, wan_pair  # noqa: F401 - a fixture

FORMATS = ("bf16", "scaled_fp8", "int8")
PLACES = {"flux_dev": "double_blocks.0.img_attn.proj", "wan_t2v": "blocks.0.self_attn.q"}
PLACES["qwen_image"] = "transformer_blocks.0.attn.to_q"
CFG_2 = Parallel(ring_degree=2, ulysses_degree=1, cfg_degree=2)
CUTS = {**DEGREES, "cfg_2_x_ring_2": CFG_2}
MODES = ("shard", "offload")
JOB = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
CACHED_JOB, THRESHOLD = JOBS["flux_dev"], THRESHOLDS["flux_dev"]
COMPILE = {"backend": "aot_eager", "fullgraph": False}
SKIPPING = Node("SkipLayerGuidanceDiT", {
    "double_layers": "0", "single_layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0,
    "rescaling_scale": 0.0})  # fmt: skip


@pytest.fixture(scope="module")
def files(formats: Path) -> None:
    """Each family in each format, and a LoRA for each."""
    for family in VARIED:
        save_file(lora_of(family), formats.parent / "loras" / f"of_{family}.safetensors")


def lora_of(family: str) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(6)
    out, inner = checkpoints.tensors(family)[0][f"{PLACES[family]}.weight"].shape
    return {
        f"diffusion_model.{PLACES[family]}.lora_up.weight": torch.randn(out, 4, generator=dice) * 0.2,
        f"diffusion_model.{PLACES[family]}.lora_down.weight": torch.randn(4, inner, generator=dice) * 0.2,
    }


def picture(family: str, name: str, lora: float, parallel: Parallel, **options: object) -> Graph:
    job = Job(family=family, cfg=2.0, size=(8, 12), prompt_tokens=(7, 12), **{"steps": 2, **options})  # type: ignore[arg-type]
    graph = sampling_graph(job, "CPSampler", parallel)
    graph["model"]["inputs"]["unet_name"] = f"{family}{name and '_'}{name}.safetensors"
    return with_loras(graph, [(f"of_{family}.safetensors", lora)] if lora else [])


@pytest.fixture(scope="module")
def replicated(shared_server: Server) -> Callable[..., Tensor]:
    """The latent with all weights on every worker, sampled once."""

    def run(family: str, name: str, lora: float, degrees: str) -> Tensor:
        graph = picture(family, name, lora, replace(CUTS[degrees], weights="replicate"))
        return latent_of(shared_server.client.run(graph))

    return functools.cache(run)


@pytest.mark.usefixtures("files")
@pytest.mark.sweep(one_in=101)
@pytest.mark.parametrize("lora", [0.0, 0.8], ids=["plain", "lora"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", VARIED)
@pytest.mark.parametrize("degrees", ["ring_2", "ulysses_2", "ring_3", FOUR, "cfg_2_x_ring_2"])
def test_the_bits_are_those_of_whole_weights(
    server: Server, replicated: Callable[..., Tensor], degrees: str, family: str, name: str, mode: str, lora: float
) -> None:
    got = latent_of(server.client.run(picture(family, name, lora, replace(CUTS[degrees], weights=mode))))
    assert torch.equal(got, replicated(family, name, lora, degrees))


@pytest.mark.usefixtures("files")
@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "int8_convrot", "fp8_e5m2", "fp8_mixed", "scaled_fp8_old"])
def test_weights_of_any_format_travel_as_bytes(
    server: Server, replicated: Callable[..., Tensor], name: str, mode: str
) -> None:
    parallel = replace(CUTS["ring_2"], weights=mode)
    got = latent_of(server.client.run(picture("flux_dev", name, 0.8, parallel)))
    assert torch.equal(got, replicated("flux_dev", name, 0.8, "ring_2"))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("mode", MODES)
def test_a_hook_on_a_parameter_that_a_lora_leaves_out(server: Server, mode: str) -> None:
    """A block's modulation: a hook changes it, a LoRA on MODEL does not."""
    dice, folder, key = torch.Generator().manual_seed(9), server.base / "models" / "loras", "blocks.2.modulation"
    shape = checkpoints.tensors("wan_t2v", layers=BLOCK_BUFFERS + 1)[0][key].shape
    for name in ("plain", "hooked"):
        change = torch.randn(shape, generator=dice)
        save_file({f"diffusion_model.{key}.diff": change}, folder / f"modulation_{name}.safetensors")

    def sampled(parallel: Parallel | None) -> Tensor:
        graph = sampling_graph(Job(family="wan_t2v", cfg=2.0), "CPSampler" if parallel else "KSampler", parallel)
        graph["model"]["inputs"]["unet_name"] = "wan_t2v_bf16.safetensors"
        graph["hook"] = node("CreateHookLoraModelOnly", lora_name="modulation_hooked.safetensors", strength_model=-0.5)
        graph = with_loras(with_hooks(graph, ["hook", 0]), [("modulation_plain.safetensors", 1.0)])
        return latent_of(server.client.run(graph))

    native = sampled(None)
    assert apart(sampled(in_two("replicate")), native) <= 1e-5
    assert apart(sampled(in_two(mode)), native) <= 1e-5


def kept_weights(server: Server) -> list[tuple[float, float]]:
    """Of the last model, on each rank: the share of it that is on the device, and in bytes all of it."""
    ranks = server.client.get("/api/cp/status")["ranks"]
    last = [rank["weights"][-1] for rank in ranks]
    return [(one["resident"] / (one["resident"] + one["fetched"]), one["resident"] + one["fetched"]) for one in last]


def in_two(mode: str, **more: object) -> Parallel:
    return replace(DEGREES["ring_2"], weights=mode, **more)  # type: ignore[arg-type]


@pytest.mark.usefixtures("files")
@pytest.mark.sweep(one_in=9)
@pytest.mark.parametrize("family", VARIED)
@pytest.mark.parametrize("degrees", ["ring_2", "ring_3", "ring_2_x_ulysses_2"])
def test_a_worker_of_several_holds_little_more_than_its_part(server: Server, degrees: str, family: str) -> None:
    parallel = replace(CUTS[degrees], weights="shard")
    workers = parallel.ring_degree * parallel.ulysses_degree
    server.client.run(picture(family, "bf16", 0.0, parallel))
    assert max(share for share, _ in kept_weights(server)) <= 1 / workers + 0.1
    server.client.run(picture(family, "bf16", 0.0, replace(parallel, weights="offload")))
    assert max(share for share, _ in kept_weights(server)) <= 0.1
    server.client.run(picture(family, "bf16", 0.0, replace(parallel, weights="auto")))
    assert min(share for share, _ in kept_weights(server)) == 1, "it fits"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sweep(one_in=2)
def test_a_model_stays_loaded_and_its_lora_changes(server: Server, mode: str) -> None:
    """Strengths there and back: the bits of the first time, loaded once each."""

    def run(where: str, strength: float) -> Tensor:
        graph = sampling_graph(JOB, "CPSampler", in_two(where))
        return latent_of(server.client.run(with_loras(graph, [("flux_dev.safetensors", strength)])))

    once = {strength: run("replicate", strength) for strength in (0, 1)}
    for strength in (0, 1, 1, 0):
        since = server.log_size()
        assert torch.equal(run(mode, strength), once[strength])
        assert "unloading" not in server.log(since)


OTHERS: dict[str, Callable[[Parallel], Graph]] = {
    "scheduled LoRA": hooked,
    "a step cache": lambda parallel: sampling_graph(CACHED_JOB, "CPSampler", replace(parallel, step_cache=THRESHOLD)),
    "a native sampler": lambda parallel: on_the_loader(sampling_graph(JOB, "KSampler"), JOB, parallel),
    "compiled blocks": lambda parallel: compiled(
        sampling_graph(JOB, "CPSampler", parallel), "CPTestCompile", **COMPILE
    ),
    "skipped layers": lambda parallel: with_nodes(sampling_graph(JOB, "CPSampler", parallel), (SKIPPING,)),
}


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_weights_or_skips_blocks_does_so_to_the_bit(server: Server, name: str, mode: str) -> None:
    whole, fetched = (latent_of(server.client.run(OTHERS[name](in_two(how)))) for how in ("replicate", mode))
    assert torch.equal(fetched, whole)


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["unload", "offload"])
def test_a_model_that_has_gone_comes_back_the_same(server: Server, policy: str, mode: str) -> None:
    want = latent_of(server.client.run(sampling_graph(JOB, "CPSampler", in_two("replicate"))))
    for _ in range(2):
        since = server.log_size()
        graph = sampling_graph(JOB, "CPSampler", in_two(mode, after_sampling=policy))
        assert torch.equal(latent_of(server.client.run(graph)), want)
        assert f"{policy}ing the workers' model" in server.log(since)
    server.client.run(sampling_graph(JOB, "CPSampler", in_two(mode)))
    server.client.free()
    assert torch.equal(latent_of(server.client.run(sampling_graph(JOB, "CPSampler", in_two(mode)))), want)


@pytest.mark.sweep
def test_after_a_cancel_the_bits_are_the_same_and_the_workers_too(server: Server) -> None:
    want = latent_of(server.client.run(sampling_graph(JOB, "CPSampler", in_two("shard"))))
    workers = server.workers()
    for step in (1, 2, 3):
        since = server.client.now()
        prompt = server.client.queue(sampling_graph(longer(JOB, steps=2000), "CPSampler", in_two("shard")))
        server.client.wait_for_step(step, since=since)
        server.client.interrupt(prompt)
        with pytest.raises(Interrupted):
            server.client.finish(prompt, since=since, timeout=20)
        assert torch.equal(latent_of(server.client.run(sampling_graph(JOB, "CPSampler", in_two("shard")))), want)
    assert server.workers() == workers


@pytest.mark.sweep  # test_crashes kills a rank in a ring
def test_a_rank_killed_while_all_gather_fails_the_run_and_the_next_one_works(server: Server) -> None:
    want = latent_of(server.client.run(sampling_graph(JOB, "CPSampler", in_two("shard"))))
    since = server.client.now()
    prompt = server.client.queue(sampling_graph(longer(JOB, steps=2000), "CPSampler", in_two("shard")))
    server.client.wait_for_step(2, since=since)
    server.workers()[1].kill()
    with pytest.raises(NodeError, match=r"(?is)(rank|worker)"):
        server.client.finish(prompt, since=since, timeout=30)
    assert torch.equal(latent_of(server.client.run(sampling_graph(JOB, "CPSampler", in_two("shard")))), want)


@pytest.mark.usefixtures("wan_pair")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sweep(one_in=2)
def test_two_models_take_turns_without_loading(server: Server, mode: str) -> None:
    want = latent_of(server.client.run(pair(in_two("replicate"))))
    server.client.run(pair(in_two(mode)))
    since = server.log_size()
    assert torch.equal(latent_of(server.client.run(pair(in_two(mode), seed=7))), want)
    assert "unloading" not in server.log(since)


@contextmanager
def memory(server: Server, mebibytes: float) -> Iterator[None]:
    """A worker may take so much; none holds anything at the start."""
    server.client.post("/cp/free")
    server.client.post("/cp_test/environment", CP_MEMORY_GIB=str(mebibytes / 1024))
    try:
        yield
    finally:
        server.client.post("/cp_test/environment", CP_MEMORY_GIB=None)


def test_auto_goes_by_what_a_worker_may_take_and_refuses_with_numbers(server: Server) -> None:
    """A file of 28 MiB, and a worker that may take 24."""
    sentence = r"FLUX does not fit: it has 2\d.\d MiB .*(fp8|workers|pixels|smaller).*CP_MEMORY_GIB"

    def sampled(mode: str, job: Job = JOB) -> Tensor:
        return latent_of(server.client.run(sampling_graph(job, "CPSampler", in_two(mode))))

    with memory(server, 24):
        assert torch.equal(sampled("auto"), sampled("replicate"))
        sampled("auto", replace(JOB, seed=8))
        assert max(share for share, _ in kept_weights(server)) < 0.9, "it did not fit as a whole"
        with pytest.raises(NodeError, match=sentence):
            sampled("auto", replace(JOB, size=(256, 256)))


def test_what_a_worker_may_take_counts_all_of_its_models_and_anew_at_each_run(server: Server) -> None:
    """Of files of 28 and 11 MiB a worker that may take 34 has one; ComfyUI is asked to let the other go."""

    def run(family: str, mode: str) -> str:
        since = server.log_size()
        server.client.run(sampling_graph(replace(JOB, family=family), "CPSampler", in_two(mode)))
        return server.log(since)

    with memory(server, 34):
        run("flux_dev", "auto")
        assert "ComfyUI unloads" not in run("flux_dev", "auto"), "it was there already"
        log_text = run("wan_t2v", "auto")
        assert re.search(r"are free there, as CP_MEMORY_GIB says; ComfyUI unloads its models\n", log_text)
        assert "unloading the workers' model" in log_text
        for rank in server.client.get("/cp/status")["ranks"]:
            assert [model["model"] for model in rank["weights"]] == ["wan_t2v.safetensors"]
        assert "ComfyUI unloads" not in run("flux_dev", "replicate"), "the limit is auto's"


@pytest.mark.sweep  # a server of its own; the test before the last has a refusal with numbers
def test_what_nobody_can_let_go_of_is_refused_with_numbers_before_a_worker_loads(comfy: ComfyInstall) -> None:
    full = {"CP_TEST_FAULT": "0 memory full;1 memory full", "CP_MEMORY_GIB": "1"}
    with running_server(comfy, env=full) as server:
        for _ in range(2):
            since = server.log_size()
            with pytest.raises(NodeError, match=r"FLUX does not fit: it has 2\d\.\d MiB of.*CP_MEMORY_GIB says so"):
                server.client.run(sampling_graph(JOB, "CPSampler", in_two("auto")))
            assert "ComfyUI unloads its models" in server.log(since)
        workers = server.workers()
        by_rank = [rank["weights"] for rank in server.client.get("/cp/status")["ranks"]]
        assert [[one["model"] for one in of_rank] for of_rank in by_rank] == [["somebody else's"]] * 2, (
            "nothing was loaded"
        )
        server.client.run(sampling_graph(JOB, "CPSampler", in_two("replicate")))
        assert server.workers() == workers
