"""Compare: one step of each sampler of this graph, natively and on the workers, with the same inputs.

The node that compares is expanded into copies of these samplers. The name of a copy says that it is one, so nothing is
switched on that a cancelled run could leave switched on."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy.samplers import CFGGuider
from comfy_api.latest import io
from comfy_execution.graph_utils import is_link
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from nodes import NODE_CLASS_MAPPINGS  # type: ignore[attr-defined]  # ComfyUI's module, not our package
from torch import Tensor

from ...parallel_runtime.commands.migrate import NATIVE
from ...parallel_runtime.errors import Refused, say
from ...parallel_runtime.explain.plan_report import Row
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.loading.random_states import random_states, set_random_states
from ..describe.sampling_job import OuterSample

COPY = "compared "  # begins the name of a sampler's copy
MODEL_NODES = ("CPModel", "CPLoadDiffusionModel")
PICTURES = ("LATENT", "IMAGE")
BAR = 1e-5  # of the standard deviation: what the order of sums does in float32
AMPLIFIED = 10  # times what one unit in the last place does: an evaluation in parts rounds more than once
UNCLEAR = 0.1  # of the standard deviation: where one unit in the last place does so much, a difference shows nothing

Prompt = dict[str, dict[str, Any]]
OneWay = Callable[[OuterSample], Tensor]
Callback = Callable[[int, Any, Any, int], None]


@dataclass(frozen=True)
class Difference:
    """How far apart the two results of a step are, the latent and what the network made of it, in standard deviations
    of the native one; `moved`: how far one unit in the last place of `dtype` moves that, None where nobody looked;
    `approximate`: whether the run on the workers was asked to be."""

    most: float
    mean: float
    dtype: str
    approximate: bool
    moved: float | None = None

    @property
    def bar(self) -> float:
        return max(BAR, (self.moved or 0.0) * (AMPLIFIED if self.dtype == "float32" else 1))

    @property
    def row(self) -> Row:
        values = {"most": f"{self.most:.1e}", "mean": f"{self.mean:.1e}", "dtype": self.dtype}
        if self.bar > UNCLEAR:
            return Row("Compare", say("compare.unclear", moved=f"{self.moved:.1e}", **values), "note")
        bar = say("compare.bar" if self.bar == BAR else "compare.bar.moved", bar=f"{self.bar:.1e}", dtype=self.dtype)
        if self.most <= self.bar:
            return Row("Compare", (say("compare.equal", **values), bar))
        if self.approximate:
            return Row("Compare", say("compare.approximate", **values), "note")
        return Row("Compare", (say("compare.unequal", **values), bar), "trouble")


_found: dict[str, list[Difference]] = {}  # of the graph that is compared, by the sampler's name there


def expanded() -> io.NodeOutput:
    """Returns what the node that runs stands for: itself without `compare`, after copies of the samplers of its graph
    that use workers, and of the nodes between them. Raises Refused where there are none."""
    context, prompt = get_executing_context(), get_progress_state().dynprompt.get_original_prompt()
    samplers = samplers_in(prompt)
    if context is None or not samplers:
        raise Refused("compare.nothing")
    _found.clear()
    leading = set().union(*(_above(prompt, sampler) for sampler in samplers))
    copied = {name for name in leading if samplers & _above(prompt, name)}
    replaced = copied | {context.node_id}  # CP Plan, without comparing, for samplers that have its configuration
    prefix, made = f"{context.node_id}.{COPY}", time.time()

    graph: Prompt = {}
    for name in copied:
        inputs = prompt[name]["inputs"]
        links = {key: value for key, value in inputs.items() if is_link(value) and value[0] in replaced}
        inputs = inputs | {key: [prefix + node, slot] for key, (node, slot) in links.items()}
        # A copy has an input that no node knows, since ComfyUI's cache must not take it for the sampler.
        graph[prefix + name] = {**prompt[name], "inputs": {**inputs, COPY: made}}
    own = get_progress_state().dynprompt.get_node(context.node_id)
    linked = {value[0] for one in graph.values() for value in one["inputs"].values() if is_link(value)}
    if prefix + context.node_id in linked:
        graph[prefix + context.node_id] = {**own, "inputs": {**own["inputs"], "compare": False}}
    ends = {COPY + name: [prefix + name, 0] for name in sorted(samplers)}
    graph[f"{prefix}end"] = {**own, "inputs": {**own["inputs"], "compare": False, **ends}}
    outputs = NODE_CLASS_MAPPINGS[own["class_type"]].RETURN_TYPES
    return io.NodeOutput(*([f"{prefix}end", index] for index in range(len(outputs))), expand=graph)


def compared_rows(ends: dict[str, Any]) -> list[Row]:
    """Returns a row for each sampler of `ends`, the inputs that `expanded` has given this node."""
    prompt, rows = get_progress_state().dynprompt.get_original_prompt(), []
    for name in (end.removeprefix(COPY) for end in ends):
        node = prompt[name]
        title = f"{node.get('_meta', {}).get('title') or node['class_type']} ({name})"
        worst = max(_found.pop(name, ()), key=lambda one: one.most / one.bar, default=None)
        row = worst.row if worst else Row("Compare", say("compare.unseen"), "note")
        sentences = (row.sentences,) if isinstance(row.sentences, str) else row.sentences
        rows.append(Row(row.title, (say("compare.node", node=title), *sentences), row.kind))
    return rows


def samplers_in(prompt: Prompt) -> set[str]:
    """Returns the names of the nodes that sample on workers: CP samplers, and those that make a picture and have, by
    themselves or in a guider or pipe, a MODEL that is sampled there."""
    found = {name for name, node in prompt.items() if node["class_type"] in NATIVE}
    todo = [name for name, node in prompt.items() if node["class_type"] in MODEL_NODES]
    seen = set(todo)
    while todo:
        source = todo.pop()
        outputs = NODE_CLASS_MAPPINGS[prompt[source]["class_type"]].RETURN_TYPES
        for name, node in prompt.items():
            links = [value for value in node["inputs"].values() if is_link(value) and value[0] == source]
            kinds = [str(kind) for _, index in links for kind in outputs[int(index) :][:1]]
            if name in seen or not any(kind in ("MODEL", "GUIDER", "*") or "PIPE" in kind for kind in kinds):
                continue
            seen.add(name)
            todo.append(name)
            if {*PICTURES} & {*map(str, NODE_CLASS_MAPPINGS[node["class_type"]].RETURN_TYPES)}:
                found.add(name)
    return found


def _above(prompt: Prompt, name: str) -> set[str]:
    """Returns the node and all that it depends on."""
    found, todo = set(), [name]
    while todo:
        if (one := todo.pop()) not in found and one in prompt:
            found.add(one)
            todo += [value[0] for value in prompt[one]["inputs"].values() if is_link(value)]
    return found


def compared_sampler() -> str | None:
    """Returns the name of the sampler whose copy runs, None where no copy does."""
    context = get_executing_context()
    _, is_copy, name = context.node_id.partition(f".{COPY}") if context is not None else ("", "", "")
    return name.partition(".")[0] if is_copy else None


def compared(
    guider: CFGGuider, call: OuterSample, natively: OneWay, on_workers: OneWay, *, steps: int, dtype: torch.dtype,
    approximate: bool,
) -> Tensor:  # fmt: skip
    """Samples the first steps on the workers and natively, notes how far apart they are, and returns the native latent.
    Both get the same noise, random numbers and guider."""

    def sampled(run: OneWay, callback: Callback | None = None, eps: float = 0.0) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}

        def note(step: int, x0: Tensor, x: Tensor, total: int) -> None:
            made["x0"] = x0
            if callback is not None:
                callback(step, x0, x, total)

        noise, latent, sigmas = call.noise * (1 + eps), call.latent_image * (1 + eps), call.sigmas[: steps + 1]
        device, attributes = guider.model_patcher.load_device, dict(vars(guider))
        states = random_states(device)
        runtime.history.purpose = "compare"
        guider.conds = {name: [dict(cond) for cond in prompt] for name, prompt in guider.conds.items()}
        try:
            made["x"] = run(replace(call, noise=noise, latent_image=latent, sigmas=sigmas, callback=note))
        finally:  # what a run changes of the guider, and the random generators, are put back
            runtime.history.purpose = ""
            vars(guider).clear()
            vars(guider).update(attributes)
            set_random_states(states, device)
        return made

    workers = sampled(on_workers)
    native = sampled(natively, call.callback)
    found = Difference(*_apart(workers, native), str(dtype).removeprefix("torch."), approximate)
    if not found.most <= BAR:
        moved, _ = _apart(sampled(natively, eps=torch.finfo(dtype).eps), native)
        found = replace(found, moved=moved)
    _found.setdefault(compared_sampler() or "", []).append(found)
    return native["x"]


def _apart(made: dict[str, Tensor], native: dict[str, Tensor]) -> tuple[float, float]:
    """Returns the largest and the mean difference, of the latent or of what the network made of it, whichever is more
    apart, in standard deviations of the native one; infinite where one has NaNs or another shape."""
    found = []
    for name in made.keys() & native.keys():
        one, other = (each[name].detach().double().cpu() for each in (made, native))
        same = one.shape == other.shape and (one.isfinite() & other.isfinite()).all()
        difference = (one - other).abs() / (other.std().item() or 1.0) if same else torch.tensor(math.inf)
        found.append((difference.max().item(), difference.mean().item()))
    return max(found)
