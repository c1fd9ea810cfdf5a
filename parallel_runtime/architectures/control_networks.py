"""How the networks of ControlNets are split. They are no MODELs: each is split like the network that its residuals are
added to, by rows for a UNet and by tokens for all others, so that no residual has to be gathered."""

from dataclasses import dataclass, field, replace

from .images_in_two_streams import FLUX_PLAN, HUNYUAN_DIT_PLAN, QWEN_IMAGE_PLAN, SD3_PLAN
from .row_plan import RowPlan
from .split_plan import IMAGE, ModulePlan, Names, Split, SplitPlan


@dataclass(frozen=True)
class ControlRowPlan(RowPlan):
    """The plan of a UNet's ControlNet. `depth` counts from the hint, whose picture is halved `hint_halvings` times
    before it has the latent's rows. What modules of the names in `averaged` are given are means over the picture."""

    hint_halvings: int = field(default=3, kw_only=True)
    averaged: Names = field(default=(), kw_only=True)


def _blocks_of(plan: SplitPlan, *no_options: str, **names: str) -> SplitPlan:
    """The plan of a network's blocks alone, which have other `names` in its ControlNet."""
    blocks = [replace(each, name=names.get(each.name, each.name)) for each in plan.module_plans if each.split_args]
    return SplitPlan(tuple(blocks), no_options=no_options)


_SD3_ATTENTION = "comfy.ldm.modules.diffusionmodules.mmdit"
PLANS: dict[str, SplitPlan] = {
    "comfy.cldm.cldm:ControlNet": ControlRowPlan(
        (), depth=lambda net: len(net.channel_mult) + 2, forward="forward", averaged=("transformer_layes",)
    ),
    "comfy.ldm.flux.controlnet:ControlNetFlux": _blocks_of(FLUX_PLAN, "comfy.ldm.flux.math"),
    "comfy.ldm.qwen_image.controlnet:QwenImageControlNetModel": _blocks_of(
        QWEN_IMAGE_PLAN, "comfy.ldm.qwen_image.model"
    ),
    "comfy.ldm.qwen_image.controlnet:QwenImageFunControlNetModel": _blocks_of(
        QWEN_IMAGE_PLAN, transformer_blocks="control_blocks"
    ),
    "comfy.cldm.mmdit:ControlNet": _blocks_of(SD3_PLAN, _SD3_ATTENTION),
    "comfy.cldm.dit_embedder:ControlNetEmbedder": SplitPlan(  # its blocks attend to the image alone
        (ModulePlan("transformer_blocks", {"x": Split(IMAGE)}, attends=IMAGE, unsplit_args=("c",)),),
        no_options=(_SD3_ATTENTION,),
    ),
    "comfy.ldm.hydit.controlnet:HunYuanControlNet": _blocks_of(HUNYUAN_DIT_PLAN, *HUNYUAN_DIT_PLAN.no_options),
}


def control_plan_of(network: object) -> SplitPlan | None:
    """The plan of a ControlNet's network by the network's own class; None for one that runs undivided."""
    kind = type(network)
    return PLANS.get(f"{kind.__module__}:{kind.__qualname__}")
