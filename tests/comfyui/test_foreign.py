"""What other packs and nodes put around a model: CP Sampler gives the picture that KSampler gives.

Where workers cannot have it, the loop stays in ComfyUI's process and the workers evaluate the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Job, Parallel, sampling_graph, with_attention_patch, with_control_net, with_hooks
from .latents import apart, latent_of
from .server import Server
from .test_kin import ALGORITHMS, GUIDERS, custom, link, node

BAR = 1e-4  # of the latent's standard deviation, float32
RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=2.0)
WAN = Job(family="wan_t2v", cfg=2.0)
QWEN = Job(family="qwen_image", cfg=2.0)
EULER = ALGORITHMS["KSamplerSelect"]

Picture = Callable[[Parallel | None], Graph]  # None: by ComfyUI's own sampler


def plain(job: Job, parallel: Parallel | None) -> Graph:
    return sampling_graph(job, "CPSampler" if parallel else "KSampler", parallel)


def on_the_model(kind: str, /, job: Job = FLUX, **widgets: Any) -> Picture:
    def picture(parallel: Parallel | None) -> Graph:
        graph = plain(job, parallel)
        graph["changed"] = node(kind, model=link("model"), **widgets)
        graph["sampler"]["inputs"]["model"] = link("changed")
        return graph

    return picture


def on_the_positive(kind: str, /, job: Job = FLUX, **widgets: Any) -> Picture:
    def picture(parallel: Parallel | None) -> Graph:
        graph = plain(job, parallel)
        graph["changed"] = node(kind, conditioning=link("positive"), **widgets)
        graph["sampler"]["inputs"]["positive"] = link("changed")
        return graph

    return picture


def with_the_guider(kind: str, /, **widgets: Any) -> Picture:
    inputs = {name: link(name) for name in ("model", "positive", "negative")}
    return lambda parallel: custom(FLUX, parallel, node(kind, **inputs, **widgets), EULER, 0)


def on_the_guider(kind: str, /, **widgets: Any) -> Picture:
    """What `kind` puts on a MODEL, on a guider of another MODEL."""

    def picture(parallel: Parallel | None) -> Graph:
        graph = with_the_guider("CPTestForeignGuider", kind="options of", other=link("changed"))(parallel)
        graph["changed"] = node(kind, model=link("model"), **widgets)
        return graph

    return picture


def with_the_sampler(kind: str, /, **widgets: Any) -> Picture:
    return lambda parallel: custom(FLUX, parallel, GUIDERS["CFGGuider"], node(kind, **widgets), 0)


def hooked(parallel: Parallel | None) -> Graph:
    """A LoRA whose strength changes from step to step."""
    graph = plain(replace(FLUX, steps=6), parallel)
    graph["hook"] = node("CreateHookLora", lora_name="flux_dev.safetensors", strength_model=1.0, strength_clip=1.0)
    graph["frames"] = node(
        "CreateHookKeyframesInterpolated", strength_start=0.0, strength_end=1.0, interpolation="linear",
        start_percent=0.0, end_percent=1.0, keyframes_count=3, print_keyframes=False,
    )  # fmt: skip
    graph["timed"] = node("SetHookKeyframes", hooks=link("hook"), hook_kf=link("frames"))
    return with_hooks(graph, link("timed"))


WINDOWS = {
    "context_length": 2, "context_overlap": 1, "context_schedule": "standard_static", "context_stride": 1,
    "closed_loop": False, "fuse_method": "pyramid", "dim": 2, "freenoise": False, "cond_retain_index_list": "",
    "split_conds_to_windows": False, "latent_retain_index_list": "", "causal_window_fix": True,
}  # fmt: skip
SKIP = {"double_layers": "0", "single_layers": "0", "start_percent": 0.0, "end_percent": 1.0}
PICTURES: dict[str, Picture] = {
    "outer_sample wrapper": on_the_model("CPTestForeignWrapper", kind="outer_sample"),
    "diffusion_model wrapper": on_the_model("CPTestForeignWrapper", kind="diffusion_model"),
    "apply_model wrapper": on_the_model("CPTestForeignWrapper", kind="apply_model"),
    "prepare_sampling wrapper": on_the_model("CPTestForeignWrapper", kind="prepare_sampling"),
    "sampler_sample wrapper": on_the_model("CPTestForeignWrapper", kind="sampler_sample"),
    "calc_cond_batch wrapper": on_the_model("CPTestForeignWrapper", kind="calc_cond_batch"),
    "predict_noise wrapper": on_the_model("CPTestForeignWrapper", kind="predict_noise"),
    **{f"{kind} wrapper in the model options": on_the_model("CPTestForeignWrapper", kind=f"options: {kind}")
       for kind in ("outer_sample", "sampler_sample", "predict_noise", "calc_cond_batch", "apply_model",
                    "diffusion_model")},
    "post-CFG function": on_the_model("CPTestForeignWrapper", kind="post_cfg"),
    "model function": on_the_model("CPTestForeignWrapper", kind="model_function"),
    "option of a pack": on_the_model("CPTestForeignWrapper", kind="transformer_option"),
    "state of a pack": on_the_model("CPTestForeignWrapper", kind="state"),
    "wrapper on Wan": on_the_model("CPTestForeignWrapper", job=WAN, kind="diffusion_model"),
    "wrapper on Qwen-Image": on_the_model("CPTestForeignWrapper", job=QWEN, kind="apply_model"),
    "guider of a pack": with_the_guider("CPTestForeignGuider", kind="subclass"),
    "guidance on a guider": with_the_guider("CPTestForeignGuider", kind="options"),
    "wrapper on a guider": with_the_guider("CPTestForeignGuider", kind="wrapper"),
    "guidance inside blocks on a guider": on_the_guider("NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5),
    "guider of one model for two": with_the_guider("DualModelGuider", model_negative=link("model"), cfg=2.0),
    "sampler of a pack": with_the_sampler("CPTestForeignSampler"),
    "ControlNet": lambda parallel: with_control_net(plain(FLUX, parallel)),
    "ControlNet on an odd size": lambda parallel: with_control_net(plain(replace(FLUX, size=(9, 13)), parallel)),
    "ControlNet with a network": on_the_positive("CPTestRealControl", model=link("model")),
    "reference image": on_the_positive("ReferenceLatent", latent=link("latent")),
    "scheduled LoRA": hooked,
    "PAG": on_the_model("PerturbedAttentionGuidance", scale=3.0),
    "SLG": on_the_model("SkipLayerGuidanceDiT", **SKIP, scale=3.0, rescaling_scale=0.0),
    "SLG simple": on_the_model("SkipLayerGuidanceDiTSimple", **SKIP),
    "context windows": on_the_model("ContextWindowsManual", job=WAN, **WINDOWS),
    "rope": on_the_model(
        "ScaleROPE", scale_x=1.5, shift_x=0.0, scale_y=1.0, shift_y=0.0, scale_t=1.0, shift_t=0.0
    ),
    "RenormCFG": on_the_model("RenormCFG", cfg_trunc=100.0, renorm_cfg=1.0),
    "compute dtype": on_the_model("ModelComputeDtype", dtype="bf16"),
}  # fmt: skip


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("what", PICTURES)
def test_what_lies_around_a_model_gives_ksamplers_picture(server: Server, what: str) -> None:
    want = latent_of(server.client.run(PICTURES[what](None)))
    parallel = replace(RING_2, dtype="auto")
    got = latent_of(server.client.run(PICTURES[what](parallel)))
    print(f"APART {what} {apart(got, want):.1e}")
    assert apart(got, want) <= (0.05 if "dtype" in what else BAR)


def test_pytorchs_attention_on_a_guider_is_a_rings_own_as_it_is_on_a_model(server: Server) -> None:
    picture = on_the_guider("ModelAttentionBackend", attention="pytorch attention")
    got, want = (latent_of(server.client.run(picture(parallel))) for parallel in (RING_2, None))
    assert apart(got, want) <= BAR


def test_a_model_that_ksampler_has_sampled_with_is_sampled_by_the_workers(server: Server) -> None:
    """ComfyUI's context windows keep that model's network."""
    since = server.log_size()
    for parallel in (None, RING_2):
        server.client.run(PICTURES["context windows"](parallel))
    assert "runs in ComfyUI's process" not in server.log(since)


@pytest.mark.parametrize("degrees", ["ring_2", "ulysses_2"])
def test_guidance_inside_blocks_is_of_each_token_and_runs_on_a_part_of_them(server: Server, degrees: str) -> None:
    picture = on_the_model("NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5)
    want = latent_of(server.client.run(picture(None)))
    assert apart(latent_of(server.client.run(picture(DEGREES[degrees]))), want) <= 1e-5


def test_patches_inside_blocks_leave_the_prompts_together(server: Server) -> None:
    """This one looks at both."""
    picture = on_the_model("NAGuidance", nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5)
    want = latent_of(server.client.run(picture(None)))
    assert apart(latent_of(server.client.run(picture(Parallel(cfg_degree=2)))), want) <= BAR
    server.client.run(picture(Parallel(devices="cpu,cpu")))
    degrees = server.client.get("/cp/status")["degrees"]
    assert (degrees["cfg_degree"], degrees["ring_degree"] * degrees["ulysses_degree"]) == (1, 2)


def test_one_line_of_the_log_says_why_the_loop_stays_in_comfyuis_process(server: Server) -> None:
    since = server.log_size()
    server.client.run(PICTURES["ControlNet"](RING_2))
    lines = [line for line in server.log(since).splitlines() if "runs in ComfyUI's process" in line]
    assert len(lines) == 1
    assert "Residuals" in lines[0]


def test_a_model_that_no_loader_has_made_is_refused_by_name_before_a_worker_starts(server: Server) -> None:
    before = server.children()
    with pytest.raises(NodeError, match=r"(?s)Refused: .*does not say which file.*take the MODEL from"):
        server.client.run(on_the_model("CPTestForeignWrapper", kind="copied")(RING_2))
    assert server.children() == before


def test_a_patch_that_sees_all_tokens_is_refused_the_degrees_that_split_them(server: Server) -> None:
    with pytest.raises(NodeError, match=r"attn1_patch of _leave_alone cannot be split by sequence.*ring_degree to 0"):
        server.client.run(with_attention_patch(plain(FLUX, RING_2)))


def test_code_that_refers_to_parts_of_the_network_is_refused_the_degrees_that_split_it(server: Server) -> None:
    with pytest.raises(NodeError, match=r"a pack's code that refers to parts of it cannot be split by sequence"):
        server.client.run(on_the_model("CPTestTampered", kind="meanwhile")(RING_2))


def test_a_network_that_a_pack_changes_during_a_run_is_refused_the_degrees_that_split_it(server: Server) -> None:
    with pytest.raises(
        NodeError, match=r"a pack's code changes Flux of the network during the run; take that node out"
    ):
        server.client.run(on_the_model("CPTestTampered", kind="meanwhile, where it runs")(RING_2))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("torch's method", r"SiLU\.forward"),
        ("torch's attention", r"torch\.nn\.functional\.scaled_dot_product_attention"),
        ("torch's attention in the forward", r"torch\.nn\.functional\.scaled_dot_product_attention"),
    ],
)
def test_code_of_torchs_that_a_pack_replaces_during_a_run_is_honoured_or_refused(
    server: Server, kind: str, name: str
) -> None:
    """AnimateDiff-Evolved replaces torch's GroupNorm for the time of a run."""
    picture = on_the_model("CPTestTampered", kind=kind)
    want, plain_one = (latent_of(server.client.run(graph)) for graph in (picture(None), plain(FLUX, None)))
    assert apart(want, plain_one) > 0.01
    assert apart(latent_of(server.client.run(picture(Parallel(devices="cpu,cpu")))), want) <= BAR
    with pytest.raises(NodeError, match=name):
        server.client.run(picture(RING_2))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("method", "with diffusion_model.forward_orig cannot be split by sequence.*ring_degree to 0"),
        ("block", r"with diffusion_model\.double_blocks\.0\.forward cannot be split by sequence.*ring_degree to 0"),
        ("hook", r"a hook on double_blocks\.0 .*cp_test_nodes.*remove it"),
    ],
)  # fmt: skip
def test_code_put_onto_the_network_itself_is_refused_the_degrees_that_split_it_and_hooks_by_name(
    server: Server, kind: str, says: str
) -> None:
    folder, name = server.base / "models" / "diffusion_models", f"tampered_{len(kind)}.safetensors"
    (folder / name).symlink_to(folder / "flux_dev.safetensors")
    graph = on_the_model("CPTestTampered", kind=kind)(RING_2)
    graph["model"]["inputs"]["unet_name"] = name
    with pytest.raises(NodeError, match=rf"(?s)Refused: .*{says}"):
        server.client.run(graph)
    assert (
        apart(latent_of(server.client.run(plain(FLUX, RING_2))), latent_of(server.client.run(plain(FLUX, None)))) <= BAR
    )
