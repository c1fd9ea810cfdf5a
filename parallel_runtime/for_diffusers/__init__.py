"""Context parallelism for scripts that use diffusers' transformers: `attach` makes one parallel, `detach` undoes it.

A room beside the engine, which it uses and which does not know it; nothing that samples in ComfyUI passes through it.
Only here and in the demo is diffusers imported. README.md has the whole of it, example.py runs.

attaching   attach and detach; adopting takes a caller's own mesh and diffusers' config
plans       how diffusers' transformers are cut
processors  the one hook into diffusers' attention, and processors of ours where diffusers' own pass it by
"""

from ..plan import Plan
from ..specs import Parallelism
from ..worker.engine.mesh import build_mesh
from .adopting import adopt_mesh, from_context_parallel_config
from .attaching import attach, detach
from .plans import plan_of

__all__ = [
    "Parallelism",
    "Plan",
    "adopt_mesh",
    "attach",
    "build_mesh",
    "detach",
    "from_context_parallel_config",
    "plan_of",
]
