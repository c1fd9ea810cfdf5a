"""CP Plan: what CP Sampler will do with this model and latent, as text, and the config to do it."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import comfy.sample
import comfy.sampler_helpers
from comfy_api.latest import io

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.families.base import Family
from ..parallel_runtime.host.cost import Work, work_of
from ..parallel_runtime.host.report import Subject, report
from ..parallel_runtime.host.runtime import measured_link
from ..parallel_runtime.specs import ModelSpec, Parallelism, ParallelRequest, Placement
from .config import CATEGORY, CPConfig, requested
from .describe import describe_model
from .plan_view import view
from .refusals import check_conds, check_latent
from .remote import plan_for


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
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="The text that the node shows."),
                CPConfig.Output(display_name="cp_config", tooltip="A config that works, for a CP Sampler."),
            ],
            is_output_node=True,
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        latent_image: dict[str, Any],
        positive: list,
        cp_config: ParallelRequest | None = None,
        cfg: float = 8.0,
    ) -> io.NodeOutput:
        text, recommended = explain(model, latent_image, positive, requested(cp_config), cfg)
        return io.NodeOutput(text, recommended, ui=view(text, recommended))


def explain(
    model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, cfg: float
) -> tuple[str, ParallelRequest]:
    """The report, and a config that works: the one asked for if it does, else the automatic one."""
    try:
        spec, family = describe_model(model, request.dtype)[:2]
    except Refused as refused:
        return f"This MODEL cannot run in the workers: {refused}", request
    guided = not math.isclose(cfg, 1.0)
    subject = subject_of(model, spec, family, latent, positive, cached=request.step_cache > 0)
    trouble = ""
    try:
        degrees, placement = plan_for(family, request, guided=guided, work=subject.work)
    except Refused as refused:
        request, degrees, placement = instead(family, request, guided, subject.work)
        trouble = f"The CP Parallel Config cannot work: {refused}.\nWith the degrees on auto"
        trouble += f" and devices {request.devices!r}:\n" if request.devices else ":\n"
    link = measured_link(placement)
    recommended = replace(
        request,
        ring_degree=degrees.ring_degree,
        ulysses_degree=degrees.ulysses_degree,
        cfg_degree=degrees.cfg_degree,
        data_degree=degrees.data_degree,
    )
    automatic = not (request.ring_degree or request.ulysses_degree)
    text = report(subject, degrees, placement, guided=guided, automatic=automatic, link=link)
    return trouble + text, recommended


def instead(
    family: Family, request: ParallelRequest, guided: bool, work: Work
) -> tuple[ParallelRequest, Parallelism, Placement]:
    """What works where `request` does not: its devices with all degrees on auto, or else everything on auto."""
    nothing = ParallelRequest(dtype=request.dtype)
    devices = replace(nothing, devices=request.devices)
    try:
        return devices, *plan_for(family, devices, guided=guided, work=work)
    except Refused:
        return nothing, *plan_for(family, nothing, guided=guided, work=work)


def subject_of(
    model: Any, spec: ModelSpec, family: Family, latent: dict[str, Any], positive: list, *, cached: bool
) -> Subject:
    samples = comfy.sample.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    check_latent(model, samples)
    check_conds(model, {"positive": comfy.sampler_helpers.convert_cond(positive)}, family, samples, samples)
    text = max((cond[0].shape[1] for cond in positive if cond[0] is not None), default=0)
    shape = tuple(samples.shape)
    work = work_of(spec, family, shape, text, cached=cached)
    title = (
        f"{family.name} ({os.path.basename(spec.path)}): {family.layers} layers, {family.heads} heads, "
        f"{work.weight_bytes / work.item_bytes / 1e9:.2f} billion weights, computed in {spec.compute_dtype}."
    )
    return Subject(model=title, tokens=family.tokens(shape, text), work=work)
