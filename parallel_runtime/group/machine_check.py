"""Checks what a plan needs of this machine: an address that others can reach, and packages."""

from __future__ import annotations

from ..accelerators import KERNELS
from ..errors import Refused
from ..planning.candidates import default_plan
from ..planning.run_plan import PlanInputs, RunPlan
from ..wire.channel import read_key
from . import endpoint


def checked_plan(inputs: PlanInputs) -> RunPlan:
    """Returns the plan as far as it needs no sizes. Raises Refused where it cannot run here: other machines could not
    reach this one, the shared token is missing, or a package is."""
    request = inputs.request
    if request.nnodes > 1:
        endpoint.check(request.rdzv_endpoint)
        read_key()
    plan = default_plan(inputs)
    kernel = KERNELS.get(request.options.attention_backend)
    if kernel and not kernel.installed:
        raise Refused(
            "backend.package",
            widget="attention_backend",
            fix={"attention_backend": "auto"},
            backend=kernel.name,
            package=kernel.package,
        )
    return plan
