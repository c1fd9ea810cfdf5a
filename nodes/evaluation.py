"""Evaluations for samplers that run in ComfyUI's own process: the network is in the workers, the loop is not."""

from __future__ import annotations

from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch.utils._pytree import tree_map_only

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.planning import plan
from ..parallel_runtime.jobs import EvaluationJob
from ..parallel_runtime.specs import ParallelRequest
from .describe import Source, describe_model, seen_together
from .encoded import side_of
from .lease import leased, staffed
from .patches import check_attributes, check_sizes, describe_inside
from .refusals import WHOLE_RUNS
from .residence import Held


class RemoteEvaluation:
    """A stand-in's answer: one round trip to the worker group."""

    def __init__(self, request: ParallelRequest) -> None:
        self._request = request
        self._source: Source | None = None  # from ComfyUI's `pre_run` to its `cleanup`: what is sampled with
        self._held: Held | None = None  # and what the workers had of it when they were asked last
        self._staffed: ParallelRequest | None = None  # on the devices that this run has

    def begin(self, model: ModelPatcher) -> None:
        """Raises Refused for a MODEL whose network no worker could have."""
        for name, without in WHOLE_RUNS.items():
            if (asked := getattr(self._request, name)) > without:
                raise Refused(
                    f"{name} {asked:g} on CP Load Diffusion Model: evaluations for a native sampler do not say where a "
                    f"run begins; sample with a CP Sampler, or set {name} to {without} here"
                )
        if model.hook_patches or model.forced_hooks:
            raise Refused(
                "hooks (scheduled LoRA) cannot change weights in the workers from step to step while the sampler runs "
                "in ComfyUI's process; remove them, or sample with KSampler"
            )
        check_sizes(model)
        check_attributes(model)
        self._source = describe_model(model, self._request)

    def __call__(self, method: str, arguments: dict[str, Any]) -> Any:
        """What ComfyUI's network would give, where its first argument is and in its dtype. Raises Refused."""
        assert self._source is not None, "an evaluation outside of a run"
        each, conds = _told_apart(arguments, method)
        options = arguments.get("transformer_options")
        result = self._answer(self._source, method, each, conds, options)
        like = next(iter(arguments.values()))
        device = (like[0] if isinstance(like, list) else like).device
        return tree_map_only(torch.Tensor, lambda part: part.to(device), result)

    def _answer(
        self, source: Source, method: str, each: dict[str, Any], conds: dict[str, Any], options: dict[str, Any] | None
    ) -> Any:
        together = seen_together(source.network, options or {})
        shape, text = _sizes(each, conds)
        work = source.work(shape, text)
        job = EvaluationJob(
            each=each,
            options=None if options is None else describe_inside(options, side_of(source.network, shape)),
            conds=conds,
            patches=source.weights,
            together=together,
            method=method,
        )
        if self._staffed is None:
            self._staffed = staffed(source.spec, source.wish(self._request, together=together), work).request
        wish = source.wish(self._staffed, together=together)
        with leased(source.spec, plan(wish).placement) as lease:
            division = lease.divide(wish, work, self._held)
            self._held = lease.held
            return lease.run(division, job).value["out"]

    def settle(self) -> None:
        """Do after a run what the user wants done with the model."""
        if self._held is not None:
            self._held.settle(self._request.after_sampling)
        self._source = self._held = self._staffed = None


def _told_apart(arguments: dict[str, Any], method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What changes from call to call: the latent, the timestep, a ControlNet's residuals; and the conditions."""
    given = {key: value for key, value in arguments.items() if value is not None and key != "transformer_options"}
    changing = [*given][:2] if method == "forward" else []
    each = {key: value for key, value in given.items() if key in (*changing, "control")}
    return each, {key: value for key, value in given.items() if key not in each}


def _sizes(each: dict[str, Any], conds: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """The latent's shape, the first of several, and the tokens of text."""
    latent = next(iter(each.values()), None)
    latent = latent[0] if isinstance(latent, list) else latent
    text = next((value for value in conds.values() if torch.is_tensor(value) and value.ndim == 3), None)
    shape = (1, 1, 1, 1) if latent is None else tuple(latent.shape)
    return shape, 0 if text is None else text.shape[1]
