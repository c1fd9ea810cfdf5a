"""CP Plan: what CP Sampler will do with this model and latent, as text, and the config to do it."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import comfy.sample
import comfy.sampler_helpers
from comfy_api.latest import io

from ...parallel_runtime.errors import Refused, say, say_if, to_json
from ...parallel_runtime.explain.plan_report import Report, Row, Subject, report
from ...parallel_runtime.explain.plan_words import unused
from ...parallel_runtime.explain.remedy import changes, in_words, instead
from ...parallel_runtime.group.history import Pace, RunSetup
from ...parallel_runtime.group.machine_check import checked_plan
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.planning.candidates import profile_of
from ...parallel_runtime.request import ParallelRequest
from ..describe.comfy_objects import Unsendable
from ..describe.control_nets import controls_of, weight_bytes
from ..describe.input_checks import check_conds, check_latent
from ..describe.model import DescribedModel, describe_model
from ..describe.refused_event import announce_refusals
from ..describe.sampling_job import describe_conds
from ..describe.vae_source import explain_decode
from ..remote.lease import dry_run, run_kind
from ..remote.measure import cost_of, measure
from ..server.settings import request_from
from .cp_config import CATEGORY, CPConfig


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
                io.Boolean.Input(
                    "measure", default=False, optional=True,
                    tooltip="Take a few steps on 1, 2, 4, ... GPUs of this machine, and show the seconds per step. The "
                    "button Measure does it once.",
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
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, measure: bool = False, **_: Any) -> float:
        """NaN, which no cached result matches, where the node measures."""
        return math.nan if measure else 0.0

    @classmethod
    @announce_refusals()
    def execute(
        cls,
        model: Any,
        latent_image: dict[str, Any],
        positive: list,
        cp_config: ParallelRequest | None = None,
        cfg: float = 8.0,
        vae: Any = None,
        measure: bool = False,
    ) -> io.NodeOutput:
        request = request_from(cp_config)
        made, recommended = explain(model, latent_image, positive, request, cfg, vae, take_times=measure)
        parts = [{**asdict(part), "lane": to_json(part.lane)} for part in made.parts]
        report_json = {
            **made.table,
            "parts": parts,
            "fix": [asdict(change) for change in made.fix],
            "times": [_pace_json(pace) for pace in made.times],
            "split": _setup_json(made.setup) if made.setup else None,
            "cost": asdict(made.cost) if made.cost else None,
        }
        return io.NodeOutput(made.text, recommended, ui={"text": (made.text,), "cp_plan": [report_json]})


def explain(
    model: Any,
    latent: dict[str, Any],
    positive: list,
    request: ParallelRequest,
    cfg: float,
    vae: Any = None,
    *,
    take_times: bool = False,
) -> tuple[Report, ParallelRequest]:
    """Returns the report and a config with the plan's degrees: the requested one, or an automatic one where that cannot
    work. `take_times`: samples a few steps first, on the plan's workers and on fewer."""
    try:
        described = describe_model(model, request).guided_by({"positive": comfy.sampler_helpers.convert_cond(positive)})
    except Refused as refused:
        return Report(rows=(_trouble_row("trouble.model", refused),)), request
    guided = not math.isclose(cfg, 1.0)
    subject = subject_of(model, described, latent, positive, request, guided=guided)
    troubles: list[Row] = []
    work = subject.work
    inputs = partial(described.inputs, work=work, guided=guided, batch_coupled=described.batch_coupled)
    requested = request
    try:
        described.check_patches(request, subject.latent, subject.text)
        checked_plan(inputs(request))
        seen = dry_run(described.spec, inputs(request))
    except Refused as refused:
        request = instead(inputs, request, refused.fix)
        seen = dry_run(described.spec, inputs(request))
        troubles.append(_trouble_row("trouble.config", refused))
        troubles.append(Row("", say("instead", setting=in_words(changes(requested, request)))))
    if take_times and not troubles:
        measure(model, latent, positive, request, seen.plan, cfg)
        seen = dry_run(described.spec, inputs(request))
    plan, group, profile = seen.plan, seen.group, profile_of(seen.inputs, seen.plan)
    degrees, readings = plan.degrees, group.readings if group is not None else ()
    recommended = request
    idle = unused(request, plan, work.network.name)
    is_final = group is not None or degrees.cfg_degree == 1 or request.cfg_degree  # else memory may decide otherwise
    if is_final and not idle:
        devices = ",".join(plan.placement.devices) if plan.left_out else request.devices
        recommended = replace(request, devices=devices, **degrees.by_name)
    decode = explain_decode(vae, subject.latent, plan.placement, profile) if vae is not None else ""
    if seen.refused is not None:
        troubles.append(_trouble_row("trouble.weights", seen.refused))
    kind = run_kind(described.spec, work)
    paces = runtime.history.paces(kind)
    setup = RunSetup.of(degrees, plan.placement)
    pace = next((one for one in paces if one.setup == setup), None)
    made = report(
        subject, plan, seen.inputs,
        free=[reading.free_bytes + reading.rank_bytes for reading in readings], decode=decode, pace=pace,
        benchmarks=readings[0].benchmarks if readings else (), troubles=troubles, compared=seen.compared,
    )  # fmt: skip
    cost = None if troubles else cost_of(plan, kind)
    return replace(made, fix=changes(requested, request), times=paces, cost=cost, setup=setup), recommended


def _pace_json(pace: Pace) -> dict[str, Any]:
    """Returns one bar of the chart as JSON: the measured seconds, and how the run was divided."""
    return {**_setup_json(pace.setup), "seconds": pace.seconds, "times": pace.speedup, "at": pace.at}


def _setup_json(setup: RunSetup) -> dict[str, Any]:
    return {"workers": setup.workers, "cpu": setup.kind == "cpu", "degrees": setup.degrees}


def _trouble_row(key: str, refused: Refused) -> Row:
    return Row("", say(key, reason=refused.sentence), "trouble")


def subject_of(
    model: Any,
    described: DescribedModel,
    latent: dict[str, Any],
    positive: list,
    request: ParallelRequest,
    *,
    guided: bool,
) -> Subject:
    samples = comfy.sample.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    first = samples.unbind()[0] if samples.is_nested else samples
    if not samples.is_nested:
        check_latent(model, samples)
    check_conds(described.architecture, described.network, {"positive": comfy.sampler_helpers.convert_cond(positive)})
    text = max((cond[0].shape[1] for cond in positive if cond[0] is not None), default=0)
    stats, shape = described.stats, tuple(first.shape)
    computed = described.spec.compute_dtype or str(model.model.get_dtype_inference()).removeprefix("torch.")
    title = say(
        "model.cut" if stats.divisible else "model.whole",
        name=stats.name,
        files=", ".join(os.path.basename(file.path) for file in described.spec.files),
        layers=stats.layers,
        heads=stats.heads,
        weights=f"{stats.weights / 1e9:.2f}",
        size=f"{stats.weight_bytes / 2**30:.2f}",
        dtype=computed,
    )
    described, controls, loop = _with_controls(model, described, positive)
    work = described.work(shape, text, prompts=len(positive) + guided, cached=request.options.step_cache > 0)
    return Subject(
        model=title,
        latent=shape,
        text=text,
        tokens=described.tokens(shape, text),
        work=work,
        batch_coupled=described.batch_coupled,
        images_coupled=described.images_coupled,
        compiled=described.spec.compilation is not None,
        controls=controls,
        loop=loop,
    )


def _with_controls(model: Any, described: DescribedModel, positive: list) -> tuple[DescribedModel, str, str]:
    """Returns the MODEL with a prompt's ControlNets, a sentence on them, and a sentence on why the loop stays in
    ComfyUI's process ("" where it does not)."""
    conds = {"positive": comfy.sampler_helpers.convert_cond(positive)}
    controls = controls_of(conds)
    try:
        describe_conds(conds, model.model_options, None)
    except Unsendable as reason:
        return described, "", say("loop.comfyui", reason=reason.sentence)
    size = f"{weight_bytes(controls) / 2**30:.2f}"
    return described.with_models_of(conds), say_if(controls, "controls", count=len(controls), size=size), ""
