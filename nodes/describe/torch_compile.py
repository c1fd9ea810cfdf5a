"""Describes torch.compile, as a MODEL or a CP Parallel Config asks for it, for the workers."""

from __future__ import annotations

import json

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS

from ...parallel_runtime.errors import Refused, quoted
from ...parallel_runtime.request import CompileChoice
from ...parallel_runtime.specs import Compilation


def compilation(model: ModelPatcher, chosen: CompileChoice) -> Compilation | None:
    """Returns how the workers compile: as ComfyUI's set_torch_compile_wrapper says on MODEL, else as chosen. Raises
    Refused for a backend or option that is code."""
    kwargs = model.model_options.get(TORCH_COMPILE_KWARGS)
    if kwargs is None:
        return Compilation() if chosen == "on" else None
    if not isinstance(kwargs["backend"], str):
        raise Refused("compile.backend", backend=quoted(kwargs["backend"]))
    plain = {name: value for name, value in (kwargs["options"] or {}).items() if not callable(value)}
    try:
        options = json.dumps(plain, sort_keys=True)
    except TypeError as error:
        raise Refused("compile.option", error=str(error)) from None
    return Compilation(
        backend=kwargs["backend"],
        mode=kwargs["mode"],
        fullgraph=bool(kwargs["fullgraph"]),
        dynamic=kwargs["dynamic"],
        options=options,
    )


def remove_compile(model: ModelPatcher) -> None:
    """Takes torch.compile off a MODEL that computes nothing in this process."""
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY)
