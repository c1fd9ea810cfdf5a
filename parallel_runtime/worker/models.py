"""The models of this rank: loaded when a job names one, made parallel as the job asks, kept until the host says."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import Refused
from ..families.base import Family
from ..specs import ModelSpec, Parallelism
from .engine.attach import attach, detach
from .engine.mesh import ContextMesh, build_mesh
from .lanes import Lanes, spread_rows
from .loading import load
from .ranks import machine, machines
from .spread import check_same_file
from .step_cache import StepCache


@dataclass(eq=False)
class Model:
    """A transformer with its family's bridge. Calling it is one evaluation of ComfyUI's `diffusion_model`.

    `merged` names the weight patches in its weights (`spec.patches` once they are), `patched` the weights they change.
    """

    spec: ModelSpec
    family: Family
    transformer: Any
    parallelism: Parallelism | None = None
    mesh: ContextMesh = field(default_factory=ContextMesh)
    merged: str = ""
    patched: frozenset[str] = frozenset()

    @property
    def branches(self) -> Lanes:
        """The groups of ranks that share the branches of guidance."""
        return Lanes(self.mesh.cfg)

    def step_cache(self, threshold: float) -> StepCache | None:
        """A cache for one run; None at threshold 0."""
        if not threshold:
            return None
        assert self.family.blocks is not None
        return StepCache(self.transformer, self.family.blocks, self.mesh, threshold)

    def __call__(self, x: Tensor, timestep: Tensor, cond: dict[str, Any]) -> Tensor:
        def evaluate(x: Tensor, timestep: Tensor, cond: dict[str, Any]) -> Tensor:
            return self.family.call(self.transformer, x, timestep, cond)

        return spread_rows(Lanes(self.mesh.data), evaluate, x, timestep, cond)


class Models:
    """Holds models by what was loaded. Meshes are kept, so that groups are built once a shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: dict[ModelSpec, Model] = {}
        self._meshes: dict[tuple[int, ...], ContextMesh] = {}

    def get(self, spec: ModelSpec, parallelism: Parallelism, on_share: Callable[[float], None]) -> Model:
        """The model that `spec` names, cut as `parallelism` says. Loads and re-attaches only what differs."""
        if spec.unpatched not in self._models:
            self._models[spec.unpatched] = self._load(spec, on_share)
        model = self._models[spec.unpatched]
        model.spec = spec
        if next(model.transformer.parameters()).device.type != self._device.type:  # it was offloaded
            model.transformer.to(self._device)
        if model.parallelism != parallelism:
            if model.parallelism is not None:
                detach(model.transformer)
            model.parallelism = None
            model.mesh = self.mesh(parallelism)
            attach(model.transformer, model.mesh, parallelism, plan=model.family.plan)
            model.parallelism = parallelism
        return model

    @property
    def loaded(self) -> list[Model]:
        return list(self._models.values())

    def drop(self, spec: ModelSpec) -> None:
        """Forget this model, if it is here."""
        self._models.pop(spec.unpatched, None)
        self._give_back()

    def offload(self, spec: ModelSpec) -> None:
        """Keep this model's weights in main memory until a job names it."""
        if model := self._models.get(spec.unpatched):
            model.transformer.to("cpu")
        self._give_back()

    def _give_back(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, spec: ModelSpec, on_share: Callable[[float], None]) -> Model:
        _check_file(spec)
        loaded = load(
            spec.path,
            weight_dtype=getattr(torch, spec.weight_dtype),
            compute_dtype=getattr(torch, spec.compute_dtype),
            device=self._device,
            hints=json.loads(spec.comfy.unet_config) if spec.comfy else {},
            on_share=on_share,
        )
        return Model(spec, loaded.family, loaded.transformer)

    def mesh(self, parallelism: Parallelism) -> ContextMesh:
        """The mesh of this shape. Collective when it is new."""
        shape = parallelism.shape
        if shape not in self._meshes:
            self._meshes[shape] = build_mesh(parallelism, self._device)
        return self._meshes[shape]


def _check_file(spec: ModelSpec) -> None:
    if machine() == 0:
        _check_unchanged(spec)
    if machines() > 1:
        check_same_file(spec.path)


def _check_unchanged(spec: ModelSpec) -> None:
    stat = os.stat(spec.path)
    if (stat.st_size, stat.st_mtime_ns) != (spec.size, spec.mtime_ns):
        raise Refused(f"{spec.path} changed on disk after it was loaded in the graph; run the loader node again")
