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

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.history import Pace
from ..parallel_runtime.host.remedy import changes, in_words, instead
from ..parallel_runtime.host.report import Report, Row, Subject, report
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.host.sentences import for_page, say
from ..parallel_runtime.host.shares import unused
from ..parallel_runtime.host.storing import Prospect, decide, why_whole
from ..parallel_runtime.specs import ParallelRequest
from .config import CATEGORY, CPConfig, requested
from .describe import Source, describe_model
from .describe_vae import explain_decode
from .lease import foreseen, kind_of
from .measure import cost_of, measure
from .refusals import check_conds, check_latent


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
                io.Latent.Input("latent_image", tooltip="The LATENT that the sampler will get: its size counts."),
                io.Conditioning.Input("positive", tooltip="The prompt: its length counts too."),
                CPConfig.Input("cp_config", optional=True, tooltip="What to examine. Unconnected: auto."),
                io.Float.Input(
                    "cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01, optional=True,
                    tooltip="The cfg that the sampler will use: at 1 there is no negative prompt to share out.",
                ),
                io.Vae.Input(
                    "vae", optional=True,
                    tooltip="The VAE that will decode the result: adds what that costs, here and with CP VAE.",
                ),
                io.Boolean.Input(
                    "measure", default=False, optional=True,
                    tooltip="Take a few steps on 1, 2, 4, ... devices of this machine, and say how long each took. The "
                    "button Measure does it once.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="The text that the node shows."),
                CPConfig.Output(
                    display_name="cp_config",
                    tooltip="The config given, its degrees written out; an automatic one where it cannot work.",
                ),
            ],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, measure: bool = False, **_: Any) -> float:
        """What is to be measured is measured anew."""
        return math.nan if measure else 0.0

    @classmethod
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
        said, recommended = explain(model, latent_image, positive, requested(cp_config), cfg, vae, take_times=measure)
        parts = [{**asdict(part), "lane": for_page(part.lane)} for part in said.parts]
        shown = {
            **said.table,
            "parts": parts,
            "fix": [asdict(change) for change in said.fix],
            "times": [_timed(pace) for pace in said.times],
            "cost": asdict(said.cost) if said.cost else None,
        }
        return io.NodeOutput(said.text, recommended, ui={"text": (said.text,), "cp_plan": [shown]})


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
    """The report; the config that was asked for, or an automatic one, with its degrees. `take_times`: on these workers
    and on fewer, first."""
    try:
        source = describe_model(model, request)
    except Refused as refused:
        return Report(rows=(_trouble("trouble.model", refused),)), request
    guided = not math.isclose(cfg, 1.0)
    subject = subject_of(model, source, latent, positive, request, guided=guided)
    troubles: list[Row] = []
    work, wish = subject.work, partial(source.wish, guided=guided, together=source.together)
    asked = request
    try:
        source.check_patches(request, subject.latent, subject.text)
        seen = foreseen(source.spec, wish(request), work)
    except Refused as refused:
        request = instead(wish, request, refused.fix)
        seen = foreseen(source.spec, wish(request), work)
        troubles.append(_trouble("trouble.config", refused))
        troubles.append(Row("", say("instead", setting=in_words(changes(asked, request)))))
    if take_times and not troubles:
        measure(model, latent, positive, request, seen.division, cfg)
        seen = foreseen(source.spec, wish(request), work)
    division, case, group = seen.division, seen.case, seen.group
    degrees, readings = division.degrees, group.readings if group is not None else ()
    free = [told.free_bytes + told.own_bytes for told in readings]
    recommended = request
    idle = unused(request, division, subject.work.figures.name)
    settled = group is not None or degrees.cfg_degree == 1 or request.cfg_degree  # else memory may decide otherwise
    if settled and not idle:
        recommended = replace(seen.request, **degrees.by_name)
    automatic = not (request.ring_degree or request.ulysses_degree)
    decode = explain_decode(vae, subject.latent, division.placement, case.link) if vae is not None else ""
    way: Prospect | None = None
    try:
        way = decide(request.weights, case)
    except Refused as refused:
        troubles.append(_trouble("trouble.weights", refused))
        request = replace(request, weights="auto")
    said = report(
        subject, division, guided=guided, automatic=automatic, link=case.link, way=way, decode=decode,
        free=free, capacity=case.capacity, races=readings[0].races if readings else (), troubles=troubles,
        whole=why_whole(request.weights, way, case) if way is not None else "",
        unused=idle, compared=seen.compared,
        resorted=request.pipeline_degree == 0 and degrees.pipeline_degree > 1, warmup=request.warmup_steps,
    )  # fmt: skip
    kind = kind_of(source.spec, subject.work)
    cost = None if troubles else cost_of(division, kind)
    return replace(said, fix=changes(asked, request), times=runtime.history.paces(kind), cost=cost), recommended


def _timed(pace: Pace) -> dict[str, Any]:
    """For the chart: what was measured, and how it was divided then."""
    cut = pace.cut
    how = {"workers": cut.workers, "cpu": cut.kind == "cpu", "degrees": cut.degrees}
    return {**how, "seconds": pace.seconds, "times": pace.times}


def _trouble(key: str, refused: Refused) -> Row:
    return Row("", say(key, reason=str(refused)), "trouble")


def subject_of(
    model: Any, source: Source, latent: dict[str, Any], positive: list, request: ParallelRequest, *, guided: bool
) -> Subject:
    samples = comfy.sample.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    first = samples.unbind()[0] if samples.is_nested else samples
    if not samples.is_nested:
        check_latent(model, samples)
    check_conds(source.plan, source.network, {"positive": comfy.sampler_helpers.convert_cond(positive)})
    text = max((cond[0].shape[1] for cond in positive if cond[0] is not None), default=0)
    figures, shape = source.figures, tuple(first.shape)
    computed = source.spec.compute_dtype or str(model.model.get_dtype_inference()).removeprefix("torch.")
    title = say(
        "model.cut" if figures.divisible else "model.whole",
        name=figures.name,
        files=", ".join(os.path.basename(file.path) for file in source.spec.files),
        layers=figures.layers,
        heads=figures.heads,
        weights=f"{figures.weights / 1e9:.2f}",
        size=f"{figures.weight_bytes / 2**30:.2f}",
        dtype=computed,
    )
    work = source.work(shape, text, prompts=len(positive) + guided, cached=request.step_cache > 0)
    return Subject(
        model=title,
        latent=shape,
        text=text,
        tokens=source.tokens(shape, text),
        work=work,
        together=source.together,
        compiled=source.spec.compilation is not None,
    )
