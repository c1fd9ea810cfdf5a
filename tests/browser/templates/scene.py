"""What a workflow's picture shows: read off the template itself, and off the plan that its config comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from parallel_runtime.architectures.row_plan import RowLevel
from parallel_runtime.explain.plan_words import Part, parts
from parallel_runtime.planning.candidates import default_plan
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.run_plan import PlanInputs
from parallel_runtime.request import ParallelRequest

from .graph import Node, Template

GPUS = 4  # of the machine in the picture, or of both where there are two
OF_UNETS = ("CheckpointLoaderSimple", "EmptyLatentImage")  # the nodes of a UNet here
WITH_SOUND = {"LTXVEmptyLatentAudio", "MiniMaxH3ImageToVideo"}
BY_TILES = {"MiniMaxH3ImageToVideo"}
SAMPLERS = ("CPSampler", "CPSamplerAdvanced", "CPSamplerCustom", "KSampler")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """`lanes` are the parts of each group of workers that has a prompt to itself, or, where there are `stages`, some of
    the network's blocks; `passes` what each sampler is called, one after the other; `given` what goes in beside the
    prompts."""

    lanes: tuple[tuple[Part, ...], ...]
    stages: int
    prompts: int
    machines: int
    width: int
    height: int
    frames: int
    steps: int
    passes: tuple[str, ...]
    given: tuple[str, ...]
    sound: bool
    vae: str

    @classmethod
    def of(cls, template: Template) -> Scene:
        values = {name: value for node in template.nodes for name, value in node.inputs.items()}
        samplers = [node for node in template.nodes if node.kind in SAMPLERS]
        kinds = {node.kind for node in template.nodes}
        guided = float(values.get("cfg", 1.0)) > 1
        return cls(
            lanes=tuple(_lanes(template, guided=guided)),
            stages=int(values.get("pipeline_degree", 1)),
            prompts=2 if guided else 1,
            machines=int(values.get("nnodes", 1)),
            width=int(values.get("width", 0)),
            height=int(values.get("height", 0)),
            frames=int(values.get("length", 1)),
            steps=int(values.get("steps", 0)),
            passes=tuple(node.title for node in samplers) if len(samplers) > 1 else ("",),
            given=tuple(_given(template.nodes)),
            sound=bool(kinds & WITH_SOUND),
            vae="" if "CPVAE" not in kinds else "by tiles" if kinds & BY_TILES else "by rows",
        )

    @property
    def size(self) -> str:
        """Of a picture that is given nobody knows it before."""
        shape = [self.width, self.height, *([self.frames] if self.frames > 1 else [])]
        return ", ".join([" x ".join(map(str, shape))] * bool(self.width) + [f"{self.steps} steps"])


def _lanes(template: Template, *, guided: bool) -> Iterator[tuple[Part, ...]]:
    """By the plan that a run makes where nothing is measured yet."""
    cut = next((node.inputs for node in template.nodes if node.kind == "CPParallelConfig"), {})
    request = ParallelRequest.of(cut)
    by_rows = {node.kind for node in template.nodes} >= set(OF_UNETS)
    network = NetworkStats(row_levels=(RowLevel(weights=1, attentions=1, width=1, messages=1),) * by_rows)
    on_one_machine = replace(request, nnodes=1, rdzv_endpoint="")  # the other machine has as many
    gpus = GPUS if on_one_machine.pipeline_degree == 1 else on_one_machine.pipeline_degree  # a stage each
    plan = default_plan(PlanInputs(request=on_one_machine, gpus=gpus, guided=guided, network=network))
    all_parts, each = parts(plan), plan.degrees.context_parallel_size
    for first in range(0, len(all_parts), each):
        yield tuple(all_parts[first : first + each])


def _given(nodes: list[Node]) -> Iterator[str]:
    shown: dict[str, Any] = {
        "LoadImage": "picture", "InpaintModelConditioning": "mask", "Canny": "edges", "LoraLoaderModelOnly": "LoRA",
        "BasicScheduler": "sigmas", "KSampler": "KSampler",
    }  # fmt: skip
    for kind, name in shown.items():
        if any(node.kind == kind for node in nodes):
            yield name
