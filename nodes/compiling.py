"""torch.compile as a MODEL or a CP Parallel Config asks for it: in words for the workers, and not in this process."""

from __future__ import annotations

import json

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.specs import Compilation, CompileChoice


def compilation(model: ModelPatcher, chosen: CompileChoice) -> Compilation | None:
    """What is on MODEL, as ComfyUI's set_torch_compile_wrapper leaves it, goes before what was chosen. Raises Refused
    for what has no words."""
    asked = model.model_options.get(TORCH_COMPILE_KWARGS)
    if asked is None:
        return Compilation() if chosen == "on" else None
    if not isinstance(asked["backend"], str):
        raise Refused(
            f"torch.compile on this MODEL has a backend that is code ({asked['backend']!r}), which the workers cannot "
            "have; name one, such as inductor"
        )
    named = {name: value for name, value in (asked["options"] or {}).items() if not callable(value)}
    try:
        options = json.dumps(named, sort_keys=True)
    except TypeError as error:
        raise Refused(f"an option of torch.compile on this MODEL cannot be sent to the workers: {error}") from None
    return Compilation(
        backend=asked["backend"],
        mode=asked["mode"],
        fullgraph=bool(asked["fullgraph"]),
        dynamic=asked["dynamic"],
        options=options,
    )


def leave_eager(model: ModelPatcher) -> None:
    """In this process nothing is computed that could be compiled."""
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY)
