"""The UNets of Stable Diffusion 1.5, 2 and XL, of the refiner, and of Stable Video Diffusion."""

from .row_plan import RowArchitecture, RowPlan

NETWORK = RowArchitecture(
    name="UNet",
    kinds=("comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",),
    plan=RowPlan((), depth=lambda net: len(net.channel_mult) - 1),
    images_coupled=lambda net: net.use_temporal_resblocks,  # a video's: its batch are frames
)
