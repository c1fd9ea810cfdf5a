"""Context parallelism for scripts that use diffusers' transformers: `attach` makes one parallel, `detach` undoes it.

It uses the engine, which does not know it; nothing that samples in ComfyUI passes through it.
Only here and in the demo is diffusers imported. README.md documents it, example.py runs.

attaching   attach and detach, the one hook into diffusers' attention, and processors of ours
plans       how diffusers' transformers are split"""

from ..architectures.split_plan import SplitPlan
from ..engine.comm.mesh import build_mesh
from ..specs import Parallelism
from .attaching import adopt_mesh, attach, detach, from_context_parallel_config
from .plans import plan_of

Plan = SplitPlan  # the name that scripts import

__all__ = [
    "Parallelism", "Plan", "SplitPlan", "adopt_mesh", "attach", "build_mesh", "detach", "from_context_parallel_config",
    "plan_of",
]  # fmt: skip
