"""An EvaluationJob: one call of the network for a sampler that runs in ComfyUI's process."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...errors import Refused
from ...jobs import PROMPTS, EvaluationJob
from ..advice import Watch
from ..pulse import Pulse
from .code import rebuild
from .model import ComfyModel
from .weights import Weights

METHODS = ("forward", "preprocess_text_embeds")  # of a network, that ComfyUI's code outside of it calls


class Evaluations:
    """Keeps the conditions of the last prompts, so that a step sends only its latent."""

    def __init__(self) -> None:
        self._prompts: dict[int, dict[str, Any]] = {}
        self._watch = Watch()

    def __call__(self, model: ComfyModel, job: EvaluationJob, pulse: Pulse) -> dict[str, Any]:
        """Returns {"out": what the network gives: a tensor [B, C_out, (T,) H, W], or several in a list}."""
        patcher, device = model.clone(job.patches, pulse.loading), comfy.model_management.get_torch_device()
        options = None if job.options is None else _options(model, job.options, patcher)
        model.load(patcher)
        pulse.beat()
        if job.conds is not None:
            self._prompts[job.prompt] = moved(job.conds, device)
            for oldest in list(self._prompts)[:-PROMPTS]:
                del self._prompts[oldest]
        if job.prompt not in self._prompts:
            raise Refused("the conditions of this prompt were not sent")
        if job.method not in METHODS:
            raise Refused(f"{job.method!r} is none of {', '.join(METHODS)}")
        arguments = {**moved(job.each, device), **self._prompts[job.prompt]}
        if model.spec.compute_dtype:  # a cp_config may ask for another than ComfyUI's process computes in
            arguments = _cast(arguments, getattr(torch, model.spec.compute_dtype))
        if options is not None:
            arguments["transformer_options"] = moved(options, device)
            if model.attention is not None:
                arguments["transformer_options"].setdefault("optimized_attention_override", model.attention)
        if job.method != "forward":
            return {"out": getattr(model.network, job.method)(**arguments)}
        given = arguments[next(iter(job.each))]
        x = given if torch.is_tensor(given) else given[0]
        with self._watch(model, x):
            out = model.spread(model.network, len(x), together=job.together, **arguments)
        for tensor in out if isinstance(out, list | tuple) else [out]:
            pulse.evaluated(tensor)
        return {"out": out}


def _options(model: ComfyModel, described: dict[str, Any], patcher: Weights) -> dict[str, Any]:
    """The transformer_options, on `patcher` too: with it ComfyUI loads what patches bring along."""
    with model.patch_models.of_job(model) as patch_model:
        options: dict[str, Any] = rebuild(described, patch_model)
    patcher.model_options["transformer_options"] = options
    return options


def _cast(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The network's inputs as ComfyUI casts them: all that is no whole number, and not the noise level."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        return [cast(item) for item in value] if isinstance(value, list) else value

    return {name: value if name.startswith("timestep") else cast(value) for name, value in arguments.items()}


def moved(value: Any, device: torch.device) -> Any:
    """The same lists and dicts with every tensor on `device`, and no longer in the memory that it came in."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)
