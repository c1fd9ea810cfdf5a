"""Gives all ranks the random numbers of ComfyUI's own device where theirs are of several kinds.

A large tensor's numbers depend on the number of a GPU's processors: samplers that draw noise on the device (ancestral
ones, lcm, sde_gpu) would have another latent on each rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...engine.comm.mesh import GroupState, comm_device_of, mesh_dim_of
from ...engine.comm.ranks import rank
from ...engine.comm.votes import all_gather_int
from ...loading.random_states import generator_kind
from ..batch_groups import broadcast_if_unlike

log = logging.getLogger(__name__)

DRAWING = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal",
    "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm",
    "uniform_",
)  # fmt: skip
FUNCTIONS = frozenset(
    function for owner in (torch, Tensor) for name in DRAWING if (function := getattr(owner, name, None)) is not None
)


class SamplerNoise(TorchFunctionMode):
    """While it is entered, what a sampler draws on this rank's `device` are the numbers of the first rank whose device
    is of the `kind` of ComfyUI's own; of rank 0 where none is, which the log says once. Collective where the ranks'
    devices differ; otherwise each draws its own, which are the same."""

    def __init__(self, device: torch.device, kind: str, group_state: GroupState) -> None:
        super().__init__()
        self._device, self._kind, self._group_state = device, kind, group_state
        own = generator_kind(device)
        alike = all_gather_int(int(own == kind)) if group_state.heterogeneous else [int(own == kind)]
        self._is_comfyuis = any(alike)
        self._source = alike.index(1) if self._is_comfyuis else 0
        self._entered = False

    def __enter__(self) -> Self:
        self._entered = self._group_state.heterogeneous or not self._is_comfyuis
        return super().__enter__() if self._entered else self

    def __exit__(self, *error: Any) -> None:
        if self._entered:
            self._entered = False
            super().__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets each rank draw its own numbers: in the network every rank has other tokens."""
        entered = self._entered
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            if entered:
                self.__enter__()

    def __torch_function__(
        self, function: Callable[..., Any], _: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        drawn = function(*args, **(kwargs or {}))
        if function not in FUNCTIONS or drawn.device.type != self._device.type or not drawn.numel():
            return drawn
        if not self._is_comfyuis and rank() == 0:
            log.warning(
                "[CP] the sampler draws noise on %s: on ComfyUI's device, %s, it would draw other numbers",
                generator_kind(self._device), self._kind,
            )  # fmt: skip
        self._is_comfyuis = True  # is said once
        if not self._group_state.heterogeneous:
            return drawn
        assert dist.group.WORLD is not None
        world = mesh_dim_of(dist.group.WORLD, comm_device_of(self._device), self._group_state)
        return drawn.copy_(broadcast_if_unlike(world, drawn.reshape(-1), self._source).view_as(drawn))
