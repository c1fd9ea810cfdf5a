"""CP Plan: what CP Sampler will do with this model and latent, as text, and the config to do it.

CP Compare: one step of each sampler natively and on the workers, for scripts; on the page CP Plan does it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import comfy.sample
import comfy.sampler_helpers
from comfy_api.latest import io
from nodes import KSampler  # type: ignore[attr-defined]  # ComfyUI's module, not our package

from ...parallel_runtime.errors import Refused, Sentence, say, say_if, to_json
from ...parallel_runtime.explain.plan_report import Report, Row, Subject, report
from ...parallel_runtime.explain.plan_words import unused
from ...parallel_runtime.group.history import RunSetup
from ...parallel_runtime.group.machines import checked_plan
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.loading.code_names import Unsendable
from ...parallel_runtime.loading.object_codec import controls_of
from ...parallel_runtime.loading.replaced_code import replaced_in_loop
from ...parallel_runtime.planning.request_checks import LEAST_STEPS, changes, in_words, instead
from ...parallel_runtime.planning.run_plan import RunPlan
from ...parallel_runtime.request import ParallelRequest
from ..describe.foreign_code import check_loop, why_native
from ..describe.host import announce_refusals
from ..describe.model import DescribedModel, describe_model
from ..describe.model_files import Conds, describer, weight_bytes
from ..describe.sampling_job import check_conds, check_latent, describe_conds, describe_on_model, text_tokens
from ..describe.vae import explain_decode
from ..remote.comparing import compared_rows, expanded
from ..remote.lease import dry_run, run_kind
from ..remote.remote_encoder import explain_encoder
from ..remote.sampling_run import model_on_workers
from ..server.routes import untested
from ..server.settings import request_from
from .cp_sampler import CATEGORY, CPConfig

log = logging.getLogger(__name__)

MEASURED_STEPS = 4  # more than one, because the first takes longer


class CPPlan(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPPlan",
            display_name="CP Plan",
            category=CATEGORY,
            description="Says what CP Sampler will do with this model and latent: workers, degrees, memory, traffic, "
            "what is wrong and how to fix it. Starts nothing.",
            search_aliases=["multi gpu", "context parallel", "memory estimate"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL that the sampler will get."),
                io.Latent.Input(
                    "latent_image", tooltip="The LATENT that the sampler will get: its size sets the number of tokens."
                ),
                io.Conditioning.Input("positive", tooltip="The prompt: its length counts too."),
                CPConfig.Input("cp_config", optional=True, tooltip="What to examine. Unconnected: auto."),
                io.Float.Input(
                    "cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01, optional=True,
                    tooltip="The cfg that the sampler will use: at 1 there is no negative prompt.",
                ),
                io.Vae.Input(
                    "vae", optional=True,
                    tooltip="The VAE that will decode the result: adds the cost of decoding, here and with CP VAE.",
                ),
                io.Clip.Input(
                    "clip", optional=True,
                    tooltip="The CLIP that encodes the prompts: adds where its text encoder goes beside the model.",
                ),
                io.Boolean.Input(
                    "measure", default=False, optional=True,
                    tooltip="Take a few steps on 1, 2, 4, ... GPUs of this machine, and show the seconds per step. The "
                    "button Measure does it once.",
                ),
                io.Boolean.Input(
                    "compare", default=False, optional=True,
                    tooltip="Take one step of each sampler of this graph that uses workers, on them and in ComfyUI's "
                    "process, and say how far apart they are. The button Compare does it once.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="The text that the node shows."),
                CPConfig.Output(
                    display_name="cp_config",
                    tooltip="The given config with its degrees written out; an automatic one if it cannot work.",
                ),
            ],
            is_output_node=True,
            enable_expand=True,
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, measure: bool = False, compare: bool = False, **_: Any) -> float:
        """A NaN of its own, which no cached result matches, where the node measures or compares."""
        return float("nan") if measure or compare else 0.0

    @classmethod
    @announce_refusals()
    def execute(
        cls, model: Any, latent_image: dict[str, Any], positive: list, cp_config: ParallelRequest | None = None,
        cfg: float = 8.0, vae: Any = None, clip: Any = None, measure: bool = False, compare: bool = False,
        **compared: Any,
    ) -> io.NodeOutput:  # fmt: skip
        if compare:
            return expanded()
        request = request_from(cp_config)
        subject = model, latent_image, positive
        made, measured, recommended = _explain(*subject, request, cfg, vae, clip, take_times=measure)
        made = replace(made, rows=(*compared_rows(compared), *made.rows))
        if newer := untested():
            made = replace(made, rows=(*made.rows, Row("Note", newer, "note")))
        parts = [{**asdict(part), "lane": to_json(part.lane)} for part in made.parts]
        report_json = {**made.table, "parts": parts, **measured}
        return io.NodeOutput(made.text, recommended, ui={"text": (made.text,), "cp_plan": [report_json]})


def _explain(
    model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, cfg: float, vae: Any, clip: Any,
    *, take_times: bool,
) -> tuple[Report, dict[str, Any], ParallelRequest]:  # fmt: skip
    """Returns the report; what to change in CP Parallel Config, measured steps and the cost of measuring, as JSON; and
    a config with the plan's degrees: the requested one, or an automatic one where that cannot work. `take_times`:
    samples a few steps first, on the plan's workers and on fewer."""
    conds = {"positive": comfy.sampler_helpers.convert_cond(positive)}
    nothing: dict[str, Any] = {"fix": [], "times": [], "split": None, "cost": None}
    if (reason := why_native(model, request)) is not None:
        return Report(rows=(Row("", say("run.native", reason=reason), "trouble"),)), nothing, request
    try:
        described = describe_model(model, request).guided_by(conds)
    except Refused as refused:
        return Report(rows=(_trouble_row("trouble.model", refused),)), nothing, request
    guided = not math.isclose(cfg, 1.0)
    cached = request.options.step_cache > 0
    subject = _subject(model, described, latent, conds, prompts=len(positive) + guided, cached=cached)
    work, requested = subject.work, request
    inputs = partial(described.inputs, work=work, guided=guided, batch_coupled=described.batch_coupled)

    def check(request: ParallelRequest) -> None:
        described.check_patches(request, subject.latent, subject.text)
        checked_plan(inputs(request))

    request, troubles = _mended(check, request)
    seen = dry_run(described.spec, inputs(request))
    if take_times and not troubles:
        _measure(model, latent, positive, request, seen.plan, cfg)
        seen = dry_run(described.spec, inputs(request))
    plan, group, profile = seen.plan, seen.group, seen.inputs.profile_of(seen.plan)
    degrees, readings = plan.degrees, group.readings if group is not None else ()
    recommended = request
    idle = unused(request, plan, work.network.name)
    is_final = group is not None or degrees.cfg_degree == 1 or request.cfg_degree  # else memory may decide otherwise
    if is_final and not idle:
        devices = ",".join(plan.placement.devices) if plan.left_out else request.devices
        recommended = replace(request, devices=devices, **degrees.by_name)
    decode = explain_decode(vae, subject.latent, plan.placement, profile) if vae is not None else ""
    encode = explain_encoder(clip, plan, seen.inputs.capacity.of(plan.ranks)) if clip is not None else ()
    if seen.refused is not None:
        troubles.append(_trouble_row("trouble.weights", seen.refused))
    kind = run_kind(described.spec, work, request)
    setup, paces = RunSetup.of(degrees, plan.placement), runtime.history.paces(kind)
    pace = next((one for one in paces if one.setup == setup), None)
    made = report(
        subject, plan, seen.inputs,
        free=[reading.free_bytes + reading.rank_bytes for reading in readings],
        decode=decode, encode=encode, pace=pace, paces=paces, troubles=troubles, compared=seen.compared,
    )  # fmt: skip
    fix = [asdict(change) for change in changes(requested, request)]
    times = [_setup_json(x.setup) | {"seconds": x.seconds, "times": x.speedup, "at": x.at} for x in paces]  # bars
    measured = {"times": times, "split": _setup_json(setup)}
    return made, {"fix": fix, **measured, "cost": None if troubles else _measuring_cost(plan, kind)}, recommended


def _mended(check: Callable[[ParallelRequest], None], requested: ParallelRequest) -> tuple[ParallelRequest, list[Row]]:
    """Returns the request, or the nearest one that passes `check`, with rows that say why."""
    try:
        check(requested)
    except Refused as refused:
        nearest, wrong = instead(check, requested, refused)
        setting = in_words(changes(requested, nearest))
        return nearest, [_trouble_row("trouble.config", wrong), Row("", say("instead", setting=setting))]
    return requested, []


def _measuring_cost(plan: RunPlan, kind: Hashable) -> dict[str, Any]:
    """Returns as JSON the cost of measuring: steps on each number of workers in turn, and their seconds if known."""
    devices = plan.placement.devices
    workers = _device_counts(len(devices))
    seconds = runtime.history.cost(kind, workers, MEASURED_STEPS)
    return {"steps": MEASURED_STEPS, "workers": workers, "cpu": devices[0] == "cpu", "seconds": seconds}


def _setup_json(setup: RunSetup) -> dict[str, Any]:
    return {"workers": setup.workers, "cpu": setup.kind == "cpu", "degrees": setup.degrees.by_name}


def _trouble_row(key: str, refused: Refused) -> Row:
    return Row("", say(key, reason=refused.sentence), "trouble")


def _subject(
    model: Any, described: DescribedModel, latent: dict[str, Any], conds: Conds, *, prompts: int, cached: bool
) -> Subject:
    samples = comfy.sample.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    first = samples.unbind()[0] if samples.is_nested else samples
    if not samples.is_nested:
        check_latent(model, samples)
    check_conds(described, conds)
    title, shape, text = _title(model, described), tuple(first.shape), text_tokens(conds)
    described, controls, loop = _with_controls(model, described, conds, shape)
    return Subject(
        model=title, latent=shape, text=text, tokens=described.tokens(shape, text),
        work=described.work(shape, text, prompts=prompts, cached=cached), batch_coupled=described.batch_coupled,
        compiled=described.spec.compilation is not None, controls=controls, loop=loop,
    )  # fmt: skip


def _title(model: Any, described: DescribedModel) -> Sentence:
    spec, stats = described.spec, described.stats
    return say(
        "model.cut" if stats.divisible else "model.whole", name=stats.name,
        files=", ".join(os.path.basename(file.path) for file in spec.files), layers=stats.layers, heads=stats.heads,
        weights=f"{stats.weights / 1e9:.2f}", size=f"{stats.weight_bytes / 2**30:.2f}",
        dtype=spec.compute_dtype or str(model.model.get_dtype_inference()).removeprefix("torch."),
    )  # fmt: skip


def _with_controls(
    model: Any, described: DescribedModel, conds: Conds, shape: tuple[int, ...]
) -> tuple[DescribedModel, str, str]:
    """Returns the MODEL with a prompt's ControlNets and the VAEs that encode for a latent of this shape, a sentence on
    ControlNets, and a sentence on why the loop stays in ComfyUI's process ("" where it does not)."""
    controls = controls_of(conds)
    try:
        check_loop(replaced_in_loop())
        parts = describer(model)
        describe_on_model(model, model.model_options, parts, described)
        describe_conds(conds, parts)
    except Unsendable as reason:
        key = "run.native" if described.stays_native else "loop.comfyui"
        return described, "", say(key, reason=reason.sentence)
    size = f"{weight_bytes(controls) / 2**30:.2f}"
    described = described.with_models_of(conds).with_vaes(parts.vaes, shape)
    return described, say_if(controls, "controls", count=len(controls), size=size), ""


def _measure(
    model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, plan: RunPlan, cfg: float
) -> None:
    """Samples a few steps with `request`, whose plan is `plan`, and on fewer devices with default degrees: the history
    keeps the seconds, as of every run. Skips a number of devices that is refused, for example for lack of memory."""
    devices = plan.placement.devices
    runtime.history.purpose = "measure"
    try:
        for count in _device_counts(len(devices)):
            measured = request if count == len(devices) else request.with_default_degrees
            measured = replace(measured, devices=",".join(devices[:count]), nnodes=1, after_sampling="keep")
            try:
                _sample(model, latent, positive, measured, cfg)
            except Refused as refused:
                log.warning("[CP] CP Plan cannot measure %d device(s): %s", count, refused)
    finally:
        runtime.history.purpose = ""


def _device_counts(devices: int) -> Sequence[int]:
    """Returns powers of two, and all devices last, so that the next run finds its workers."""
    doubled = [1 << power for power in range(devices.bit_length()) if 1 << power < devices]
    return [*doubled, devices]


def _sample(model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, cfg: float) -> None:
    patched, warmup = request.options.token_patches > 1, request.options.warmup_steps
    KSampler().sample(
        model_on_workers(model, request), seed=0,
        steps=max(LEAST_STEPS, warmup + MEASURED_STEPS) if patched else MEASURED_STEPS, cfg=cfg, sampler_name="euler",
        scheduler="simple", positive=positive, negative=positive, latent_image=latent, denoise=1.0,
    )  # fmt: skip


class CPCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPCompare",
            display_name="CP Compare",
            category=CATEGORY,
            description="Takes one step of each sampler of this graph that uses workers, on them and in ComfyUI's "
            "process, and says how far apart they are. CP Plan's button Compare does the same.",
            is_dev_only=True,
            outputs=[io.String.Output(display_name="report", tooltip="What is apart, a line a sampler.")],
            is_output_node=True,
            enable_expand=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """A NaN of its own, which no cached result matches."""
        return float("nan")

    @classmethod
    @announce_refusals()
    def execute(cls, compare: bool = True, **compared: Any) -> io.NodeOutput:
        if not compared:
            return expanded()
        report = Report(rows=tuple(compared_rows(compared)))
        return io.NodeOutput(report.text, ui={"text": (report.text,), "cp_compare": [report.table]})
