"""An EvaluationJob: one call of the network for a sampler that runs in ComfyUI's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...errors import Refused, quoted
from ...jobs import MAX_CACHED_CONDS, Described, EvaluationJob, is_outer_method
from ...loading import code_names
from ...loading.object_codec import rebuild
from ..progress import Progress
from .comfy_model import ComfyModel

FORWARDS = ("forward", "_forward")  # ComfyUI's process may have done what `forward` does beside `_forward`


def evaluate(model: ComfyModel, job: EvaluationJob, progress: Progress) -> dict[str, Any]:
    """Returns {"out": what the network gives: a tensor [B, C_out, (T,) H, W], or several in a list}."""
    if code_names.asked and job.cond_arguments is not None:  # once a run; an earlier job's packs may have replaced code
        model.check_replaced({}, loop=False)
    patcher, device = model.clone(job.weight_patches, progress.loading), model.device
    options: dict[str, Any] | None = None
    if job.options is not None:
        with model.additional.of_job(model) as load_additional:
            options = rebuild(job.options, load_additional)
        patcher.model_options["transformer_options"] = options  # so that ComfyUI loads the patches' models
    model.load([patcher])
    progress.heartbeat()
    arguments = {**moved(job.call_arguments, device), **_cond_arguments(model, job, device)}
    if job.method not in FORWARDS and not is_outer_method(job.method):
        raise Refused("job.method", method=quoted(job.method), methods=", ".join(FORWARDS))
    if model.spec.compute_dtype:  # a cp_config may set another one than ComfyUI's process computes in
        times = job.call_arguments.keys() - {next(iter(job.call_arguments), ""), "control"}
        dtype = getattr(torch, model.spec.compute_dtype)
        arguments = {name: value if name in times else _cast(value, dtype) for name, value in arguments.items()}
    if options is not None:
        arguments["transformer_options"] = moved(options, device)
        if model.attention is not None:
            arguments["transformer_options"].setdefault("optimized_attention_override", model.attention)
    if job.method not in FORWARDS:
        return {"out": getattr(model.network, job.method)(**arguments)}
    latents = arguments[next(iter(job.call_arguments))]
    x = latents if torch.is_tensor(latents) else latents[0]
    with called_as(job.method, model.network):
        out = model.data_parallel(model.network, len(x), batch_coupled=job.batch_coupled, **arguments)
    progress.compare_ranks("an evaluation", "prediction", *(out if isinstance(out, list | tuple) else [out]))
    return {"out": out}


@contextmanager
def called_as(method: str, network: nn.Module) -> Iterator[None]:
    """Has a call of `network`, with the hooks that split it, compute this `method`."""
    network.forward = getattr(network, method)
    try:
        yield
    finally:
        del network.forward


def _cond_arguments(model: ComfyModel, job: EvaluationJob, device: torch.device) -> dict[str, Any]:
    """Returns the conditions of the job's prompt: the model keeps its last ones, and a step sends its latent."""
    if job.cond_arguments is not None:
        model.clear_kv_cache()
        arguments = moved(job.cond_arguments, device)
        model.cond_arguments[job.cond_number] = tree_map_only(Described, _made, arguments)
        for oldest in list(model.cond_arguments)[:-MAX_CACHED_CONDS]:
            del model.cond_arguments[oldest]
    if job.cond_number not in model.cond_arguments:
        raise Refused("conds.unsent")
    return model.cond_arguments[job.cond_number]


def _made(described: Described) -> Any:
    """Makes an object again, out of the memory of the message."""
    return rebuild(replace(described, tensors={name: one.clone() for name, one in described.tensors.items()}))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of a network's argument, as ComfyUI does."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return [_cast(item, dtype) for item in value] if isinstance(value, list) else value


def moved(value: Any, device: torch.device) -> Any:
    """Copies the lists and dicts with every tensor on `device`, out of the memory of the message."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)
