"""Prints as JSON which arguments of the tables' networks' blocks no plan names, and which networks this ComfyUI cannot
make, in ComfyUI's python: `python -m tests.zoo.block_arguments`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

from torch import nn

from parallel_runtime.architectures import architecture_of
from parallel_runtime.architectures.network_modules import modules_of
from parallel_runtime.architectures.split_plan import ModulePlan

from .networks import NETWORKS
from .tiny import make, start_comfyui


def unnamed(network: nn.Module, module_plan: ModulePlan) -> Iterator[str]:
    """Arguments of the modules of a plan, which names some by their positions."""
    named = {*module_plan.args, *module_plan.unsplit_args, "transformer_options"}
    for kind in {type(module) for module in modules_of(network, module_plan)}:
        _, *parameters = inspect.signature(kind.forward).parameters
        for position, name in enumerate(parameters):
            if not {position, name} & named:
                yield f"{kind.__module__.removeprefix('comfy.ldm.')} {kind.__name__}: {name}"


def main() -> None:
    start_comfyui()
    arguments: set[str] = set()
    unmade: dict[str, str] = {}
    for name in NETWORKS:
        try:
            network = make(name)
            architecture = architecture_of(network)
            for module_plan in architecture.plan.module_plans if architecture else ():
                if module_plan.args or module_plan.unsplit_args:
                    arguments |= {*unnamed(network, module_plan)}
        except (ImportError, AttributeError, TypeError, ValueError, KeyError, RuntimeError) as failure:
            unmade[name] = f"{type(failure).__name__}: {failure}"[:200]
    found = {"networks of tests/zoo that cannot be made": unmade}
    print(json.dumps({"block arguments that no plan names": dict.fromkeys(sorted(arguments), ""), **found}))


if __name__ == "__main__":
    main()
