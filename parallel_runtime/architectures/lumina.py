"""Lumina 2 and Z-Image: text and image in one stream, after a refiner of the image alone.

Z-Image on patches of pixels slices the text off right after the blocks; its decoder of pixels runs in full on every
rank.
"""

from dataclasses import replace

from .architecture import Architecture
from .split_plan import IMAGE, JOINT, Gather, ModulePlan, Slices, Split, SplitLike, SplitPlan

REFINER = ModulePlan(
    "noise_refiner",
    {"x": Split(IMAGE), "freqs_cis": SplitLike(IMAGE), "timestep_zero_index": Slices(IMAGE)},
    attends=IMAGE,
    unsplit_args=("adaln_input",),
    gathers=True,
    never_skipped=True,
)
LAYERS = ModulePlan(
    "layers",
    {"x": Split(JOINT), "freqs_cis": SplitLike(JOINT), "timestep_zero_index": Slices(JOINT)},
    attends=JOINT,
    unsplit_args=("adaln_input",),
)
LAST = ModulePlan(
    "final_layer", {"x": Gather(JOINT, after=True), "timestep_zero_index": Slices(JOINT)}, unsplit_args=("c",)
)
NETWORK = Architecture(
    name="Lumina 2 or Z-Image",
    kinds=("comfy.ldm.lumina.model:NextDiT",),
    plan=SplitPlan((REFINER, LAYERS, LAST)),
    padded=lambda net: net.patch_size,
)
PIXELS = replace(
    NETWORK,
    name="Z-Image in pixels",
    kinds=("comfy.ldm.lumina.model:NextDiTPixelSpace",),
    plan=SplitPlan((REFINER, replace(LAYERS, gathers=True))),
)
