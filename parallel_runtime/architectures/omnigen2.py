"""OmniGen 2: refiners of the image and of references, then one stream of all. Boogu has the same refiners, and blocks
of two streams, which attend twice, before those of one."""

from typing import Any

from .architecture import Architecture
from .split_plan import IMAGE, JOINT, TEXT, Gather, ModulePlan, Names, Split, SplitLike, SplitPlan

REFERENCES = ("references",)
IMAGES = ("images",)  # of references and the one that is made


def blocks(name: str, streams: Names, **more: Any) -> ModulePlan:
    return ModulePlan(
        name,
        {"hidden_states": Split(streams), "image_rotary_emb": SplitLike(streams)},
        attends=streams,
        unsplit_args=("temb",),
        **more,
    )


def _with_the_last(net: Any) -> list[int]:
    """Puts the last refiners into one stage, which must have all tokens that are joined next."""
    return [len(net.noise_refiner) - 1] * len(net.ref_image_refiner)


REFINERS = (
    blocks("noise_refiner", IMAGE, gathers=True, never_skipped=True),
    blocks("ref_image_refiner", REFERENCES, gathers=True, never_skipped=True, runs_with=_with_the_last),
)
LAST = ModulePlan("norm_out", {"x": Gather(JOINT, after=True)}, unsplit_args=("conditioning_embedding",))

OMNIGEN2 = Architecture(
    name="OmniGen 2",
    kinds=("comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel",),
    plan=SplitPlan((*REFINERS, blocks("layers", JOINT), LAST)),
)

DOUBLE = ModulePlan(
    "double_stream_layers",
    {
        "img_hidden_states": Split(IMAGES),
        "instruct_hidden_states": Split(TEXT),
        "joint_rotary_emb": SplitLike(TEXT + IMAGES),
        "img_rotary_emb": SplitLike(IMAGES),
    },
    attends=[TEXT + IMAGES, IMAGES],
    unsplit_args=("temb",),
    gathers=True,
)
BOOGU = Architecture(
    name="Boogu",
    kinds=("comfy.ldm.boogu.model:BooguTransformer2DModel",),
    plan=SplitPlan((*REFINERS, DOUBLE, blocks("single_stream_layers", JOINT), LAST)),
)
