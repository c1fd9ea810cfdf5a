"""Krea 2: text and image in one stream."""

from .architecture import Architecture
from .split_plan import JOINT, Gather, Index, ModulePlan, Split, SplitLike, SplitPlan

BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(JOINT), "freqs": SplitLike(JOINT, 2), "timestep_zero_index": Index("joint")},
    attends=JOINT,
    unsplit_args=("vec",),
)
NETWORK = Architecture(
    name="Krea 2",
    kinds=("comfy.ldm.krea2.model:SingleStreamDiT",),
    plan=SplitPlan((BLOCKS, ModulePlan("last", {"x": Gather(JOINT, after=True)}, unsplit_args=("tvec",)))),
    width=lambda net: net.first.out_features,
    patch=(1, 2, 2),
)
