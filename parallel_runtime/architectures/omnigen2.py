"""OmniGen 2: refiners of the image and of references, then one stream of all."""

from typing import Any

from .architecture import Architecture
from .split_plan import IMAGE, JOINT, Gather, ModulePlan, Split, SplitLike, SplitPlan

REFERENCES = ("references",)


def refiner(name: str, streams: tuple[str, ...], **more: Any) -> ModulePlan:
    return ModulePlan(
        name,
        {"hidden_states": Split(streams), "image_rotary_emb": SplitLike(streams)},
        attends=streams,
        unsplit_args=("temb",),
        gathers=True,
        never_skipped=True,
        **more,
    )


def _with_the_last(net: Any) -> list[int]:
    """Puts the last refiners into one stage, which must have all tokens that are joined next."""
    return [len(net.noise_refiner) - 1] * len(net.ref_image_refiner)


REFINERS = (refiner("noise_refiner", IMAGE), refiner("ref_image_refiner", REFERENCES, runs_with=_with_the_last))

PLAN = SplitPlan(
    (
        *REFINERS,
        ModulePlan(
            "layers",
            {"hidden_states": Split(JOINT), "image_rotary_emb": SplitLike(JOINT)},
            attends=JOINT,
            unsplit_args=("temb",),
        ),
        ModulePlan("norm_out", {"x": Gather(JOINT)}),
    )
)

NETWORK = Architecture(name="OmniGen 2", kinds=("comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel",), plan=PLAN)
