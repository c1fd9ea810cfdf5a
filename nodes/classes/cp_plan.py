"""CP Plan: what CP Sampler will do with this model and latent, as text, and the config to do it.

CP Compare: one step of each sampler natively and on the workers, for scripts; on the page CP Plan does it."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import comfy.sample
import comfy.sampler_helpers
from comfy_api.latest import io
from nodes import KSampler  # type: ignore[attr-defined]  # ComfyUI's module, not our package

from ...parallel_runtime.errors import Refused, say, say_if, to_json
from ...parallel_runtime.explain import plan_words
from ...parallel_runtime.explain.plan_report import Report, Row, Subject, report
from ...parallel_runtime.group import history, machines
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.loading import code_names, object_codec, replaced_code
from ...parallel_runtime.planning import request_checks, run_plan
from ...parallel_runtime.request import ParallelRequest
from ..describe import foreign_code, sampling_job
from ..describe.host import announce_refusals, request_from, untested
from ..describe.model import DescribedModel, describe_model
from ..describe.model_files import Conds, describer, explain_decode, weight_bytes
from ..remote import comparing, lease, remote_encoder, sampling_run
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
            return comparing.expanded()
        request = request_from(cp_config)
        subject = model, latent_image, positive
        made, measured, recommended = _explain(*subject, request, cfg, vae, clip, take_times=measure)
        made = replace(made, rows=(*comparing.compared_rows(compared), *made.rows))
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
    if (reason := foreign_code.why_native(model, request)) is not None:
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
        machines.checked_plan(inputs(request))

    request, troubles = _mended(check, request)
    seen = lease.dry_run(described.spec, inputs(request))
    if take_times and not troubles:
        _measure(model, latent, positive, request, seen.plan, cfg)
        seen = lease.dry_run(described.spec, inputs(request))
    plan, group, profile = seen.plan, seen.group, seen.inputs.profile_of(seen.plan)
    degrees, readings = plan.degrees, group.readings if group is not None else ()
    recommended = request
    idle = plan_words.unused(request, plan, work.network.name)
    is_final = group is not None or degrees.cfg_degree == 1 or request.cfg_degree  # else memory may decide otherwise
    if is_final and not idle:
        devices = ",".join(plan.placement.devices) if plan.left_out else request.devices
        recommended = replace(request, devices=devices, **degrees.by_name)
    decode = explain_decode(vae, subject.latent, plan.placement, profile) if vae is not None else ""
    encode = remote_encoder.explain_encoder(clip, plan, seen.inputs.capacity.of(plan.ranks)) if clip is not None else ()
    if seen.refused is not None:
        troubles.append(_trouble_row("trouble.weights", seen.refused))
    kind = lease.run_kind(described.spec, work, request)
    setup, paces = history.RunSetup.of(degrees, plan.placement), runtime.history.paces(kind)
    pace = next((one for one in paces if one.setup == setup), None)
    made = report(
        subject, plan, seen.inputs,
        free=[reading.free_bytes + reading.rank_bytes for reading in readings],
        decode=decode, encode=encode, pace=pace, paces=paces, troubles=troubles, compared=seen.compared,
    )  # fmt: skip
    fix, workers = [asdict(change) for change in request_checks.changes(requested, request)], _device_counts(plan)
    cost = {"steps": MEASURED_STEPS, "workers": workers, "cpu": plan.placement.devices[0] == "cpu"}
    cost["seconds"] = runtime.history.cost(kind, workers, MEASURED_STEPS)
    times = [_setup_json(x.setup) | {"seconds": x.seconds, "times": x.speedup, "at": x.at} for x in paces]  # bars
    measured = {"fix": fix, "times": times, "split": _setup_json(setup), "cost": None if troubles else cost}
    return made, measured, recommended


def _mended(check: Callable[[ParallelRequest], None], requested: ParallelRequest) -> tuple[ParallelRequest, list[Row]]:
    """Returns the request, or the nearest one that passes `check`, with rows that say why."""
    try:
        check(requested)
    except Refused as refused:
        nearest, wrong = request_checks.instead(check, requested, refused)
        setting = request_checks.in_words(request_checks.changes(requested, nearest))
        return nearest, [_trouble_row("trouble.config", wrong), Row("", say("instead", setting=setting))]
    return requested, []


def _setup_json(setup: history.RunSetup) -> dict[str, Any]:
    return {"workers": setup.workers, "cpu": setup.kind == "cpu", "degrees": setup.degrees.by_name}


def _trouble_row(key: str, refused: Refused) -> Row:
    return Row("", say(key, reason=refused.sentence), "trouble")


def _subject(
    model: Any, described: DescribedModel, latent: dict[str, Any], conds: Conds, *, prompts: int, cached: bool
) -> Subject:
    """Returns what the report is about. `model` is sampled with the ControlNets of its prompt, and with VAEs that
    encode for this latent."""
    samples = comfy.sample.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    first = samples.unbind()[0] if samples.is_nested else samples
    if not samples.is_nested:
        sampling_job.check_latent(model, samples)
    sampling_job.check_conds(described, conds)
    shape, text, spec, stats = tuple(first.shape), sampling_job.text_tokens(conds), described.spec, described.stats
    title = say(
        "model.cut" if stats.divisible else "model.whole", name=stats.name,
        files=", ".join(os.path.basename(file.path) for file in spec.files), layers=stats.layers, heads=stats.heads,
        weights=f"{stats.weights / 1e9:.2f}", size=f"{stats.weight_bytes / 2**30:.2f}",
        dtype=spec.compute_dtype or str(model.model.get_dtype_inference()).removeprefix("torch."),
    )  # fmt: skip
    controls, loop = "", ""  # on ControlNets, and on why the loop stays in ComfyUI's process
    try:
        foreign_code.check_loop(replaced_code.replaced_in_loop())
        parts = describer(model)
        sampling_job.describe_on_model(model, model.model_options, parts, described)
        sampling_job.describe_conds(conds, parts)
    except code_names.Unsendable as reason:
        loop = say("run.native" if described.stays_native else "loop.comfyui", reason=reason.sentence)
    else:
        nets = object_codec.controls_of(conds)
        controls = say_if(nets, "controls", count=len(nets), size=f"{weight_bytes(nets) / 2**30:.2f}")
        described = described.with_models_of(conds).with_vaes(parts.vaes, shape)
    return Subject(
        model=title, latent=shape, text=text, tokens=described.tokens(shape, text),
        work=described.work(shape, text, prompts=prompts, cached=cached), batch_coupled=described.batch_coupled,
        compiled=spec.compilation is not None, controls=controls, loop=loop,
    )  # fmt: skip


def _measure(
    model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, plan: run_plan.RunPlan, cfg: float
) -> None:
    """Samples a few steps with `request`, whose plan is `plan`, and on fewer devices with default degrees: the history
    keeps the seconds, as of every run. Skips a number of devices that is refused, for example for lack of memory."""
    devices = plan.placement.devices
    runtime.history.purpose = "measure"
    try:
        for count in _device_counts(plan):
            measured = request if count == len(devices) else request.with_default_degrees
            measured = replace(measured, devices=",".join(devices[:count]), nnodes=1, after_sampling="keep")
            steps = MEASURED_STEPS
            if measured.options.token_patches > 1:
                steps = max(request_checks.LEAST_STEPS, measured.options.warmup_steps + MEASURED_STEPS)
            try:
                KSampler().sample(
                    sampling_run.model_on_workers(model, measured), seed=0, steps=steps, cfg=cfg, sampler_name="euler",
                    scheduler="simple", positive=positive, negative=positive, latent_image=latent, denoise=1.0,
                )  # fmt: skip
            except Refused as refused:
                log.warning("[CP] CP Plan cannot measure %d device(s): %s", count, refused)
    finally:
        runtime.history.purpose = ""


def _device_counts(plan: run_plan.RunPlan) -> Sequence[int]:
    """Returns powers of two, and all of the plan's devices last, so that the next run finds its workers."""
    devices = len(plan.placement.devices)
    doubled = [1 << power for power in range(devices.bit_length()) if 1 << power < devices]
    return [*doubled, devices]


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
            return comparing.expanded()
        report = Report(rows=tuple(comparing.compared_rows(compared)))
        return io.NodeOutput(report.text, ui={"text": (report.text,), "cp_compare": [report.table]})
