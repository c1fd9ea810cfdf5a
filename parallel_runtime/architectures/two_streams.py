"""Networks whose picture, or video, has a stream of tokens beside the text's, or reads the text as keys only; and those
of ControlNets."""

from dataclasses import replace

from .row_plan import ControlRowPlan
from .split_plan import (
    IMAGE,
    TEXT,
    Architecture,
    Gather,
    Index,
    ModulePlan,
    Slices,
    Split,
    SplitLike,
    SplitPlan,
    inputs_of,
)

# FLUX.1 (dev, schnell, Fill, depth, canny, Kontext, USO) and FLUX.2 (dev, klein): one class, one plan. Others have its
# blocks: Chroma, Chroma Radiance on patches of pixels, whose decoder of pixels runs in full on every rank, and
# Hunyuan 3D 2, without positions and with points of a shape in place of pixels.
TEXT_IMAGE = TEXT + IMAGE
FLUX_DOUBLE = ModulePlan(
    "double_blocks",
    {"img": Split(IMAGE), "txt": Split(TEXT), "pe": SplitLike(TEXT_IMAGE, 2), "modulation_dims_img": Slices(IMAGE)},
    attends=TEXT_IMAGE,
    unsplit_args=("vec", "attn_mask"),
)
FLUX_SINGLE = ModulePlan(
    "single_blocks",
    {"x": Split(TEXT_IMAGE), "pe": SplitLike(TEXT_IMAGE, 2), "modulation_dims": Slices(IMAGE, after=TEXT)},
    attends=TEXT_IMAGE,
    unsplit_args=("vec", "attn_mask"),
)
# Tokens stay split between the two stacks, so that residuals, which are added between blocks, fit.
FLUX_LAST = ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("vec",))
FLUX_ZERO_TIME = {**FLUX_LAST.args, "modulation_dims": Slices(IMAGE)}
FLUX_PLAN = SplitPlan((FLUX_DOUBLE, FLUX_SINGLE, replace(FLUX_LAST, args=FLUX_ZERO_TIME)))

FLUX = Architecture(
    name="FLUX",
    kinds=("comfy.ldm.flux.model:Flux",),
    plan=FLUX_PLAN,
    text_width=inputs_of("txt_in"),
    pooled_width=inputs_of("vector_in.in_layer"),
)
CHROMA = Architecture(
    name="Chroma",
    kinds=("comfy.ldm.chroma.model:Chroma",),
    plan=SplitPlan((FLUX_DOUBLE, FLUX_SINGLE, FLUX_LAST)),
    text_width=inputs_of("txt_in"),
)
RADIANCE = replace(
    CHROMA,
    name="Chroma Radiance",
    kinds=("comfy.ldm.chroma_radiance.model:ChromaRadiance",),
    plan=SplitPlan((replace(FLUX_DOUBLE, gathers=True), replace(FLUX_SINGLE, gathers=True))),
)
HUNYUAN_3D_2 = Architecture(
    name="Hunyuan 3D 2",
    kinds=("comfy.ldm.hunyuan3d.model:Hunyuan3Dv2",),
    plan=FLUX_PLAN,
    patch=(1,),
    width=lambda net: net.double_blocks[0].hidden_size,
    text_width=inputs_of("cond_in"),
)

# HunyuanVideo (text and both image to video), HunyuanVideo 1.5 and HunyuanImage: FLUX's blocks, some no single ones.
# After them the parent slices reference latents off by whole positions, so each stack ends full. The image's slices are
# applied to text and image: that is how ComfyUI does it.
HUNYUAN_VIDEO_DOUBLE = replace(
    FLUX_DOUBLE, args={**FLUX_DOUBLE.args, "modulation_dims_txt": Slices(TEXT)}, gathers=True
)
HUNYUAN_VIDEO_SINGLE = replace(
    FLUX_SINGLE, args={**FLUX_SINGLE.args, "modulation_dims": Slices(TEXT_IMAGE)}, gathers=True
)
HUNYUAN_VIDEO = Architecture(
    name="HunyuanVideo",
    kinds=("comfy.ldm.hunyuan_video.model:HunyuanVideo",),
    plan=SplitPlan((HUNYUAN_VIDEO_DOUBLE, HUNYUAN_VIDEO_SINGLE), residuals=("input",)),
)

# AuraFlow. The parent slices the text off right before its last layer.
AURA_FLOW_DOUBLE = ModulePlan(
    "double_layers", {"c": Split(TEXT), "x": Split(IMAGE)}, attends=TEXT_IMAGE, unsplit_args=("global_cond",)
)
AURA_FLOW_SINGLE = ModulePlan(
    "single_layers", {"cx": Split(TEXT_IMAGE)}, attends=TEXT_IMAGE, unsplit_args=("global_cond",)
)

AURA_FLOW = Architecture(
    name="AuraFlow",
    kinds=("comfy.ldm.aura.mmdit:MMDiT",),
    plan=SplitPlan((AURA_FLOW_DOUBLE, AURA_FLOW_SINGLE, ModulePlan("final_linear", {0: Gather(IMAGE, after=True)}))),
    width=lambda net: net.final_linear.in_features,
    text_width=inputs_of("cond_seq_linear"),
)

# HiDream I1. Each block gets another text beside what it kept of the last: the text stays full, and is attended to
# in shares.
IMAGE_TEXT = IMAGE + TEXT
HIDREAM_DOUBLE = ModulePlan(
    "double_stream_blocks",
    {"image_tokens": Split(IMAGE), "text_tokens": Split(TEXT), "rope": SplitLike(IMAGE_TEXT)},
    attends=IMAGE_TEXT,
    unsplit_args=("adaln_input",),
)
HIDREAM_SINGLE = ModulePlan(
    "single_stream_blocks",
    {"image_tokens": Split(IMAGE_TEXT), "rope": SplitLike(IMAGE_TEXT)},
    attends=IMAGE_TEXT,
    unsplit_args=("adaln_input",),
)
HIDREAM_LAST = ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("vec",))
HIDREAM = Architecture(
    name="HiDream I1",
    kinds=("comfy.ldm.hidream.model:HiDreamImageTransformer2DModel",),
    plan=SplitPlan((HIDREAM_DOUBLE, HIDREAM_SINGLE, HIDREAM_LAST), replicated=frozenset(TEXT)),
)

# Hunyuan DiT, and Hunyuan 3D 2.1 with points of a shape in place of pixels, and the time in front of them. The second
# half of the blocks is given what the first half left. The text, or the picture, is read as keys only.
HUNYUAN_DIT_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(IMAGE), "freq_cis_img": SplitLike(IMAGE, 0), "skip": Split(IMAGE)},
    attends=IMAGE,
    submodule_attends={"attn2": "local"},
    unsplit_args=("c", "text_states"),
    updates=("x",),
    never_skipped=True,  # what a block leaves for later cannot be skipped
)
HUNYUAN_DIT_PLAN = SplitPlan(
    (HUNYUAN_DIT_BLOCKS, ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("c",))),
    residuals=("output",),
    no_options=("comfy.ldm.hydit.attn_layers",),
)
HUNYUAN_DIT = Architecture(name="Hunyuan DiT", kinds=("comfy.ldm.hydit.models:HunYuanDiT",), plan=HUNYUAN_DIT_PLAN)

POINTS = ("points",)
POINT_BLOCKS = ModulePlan(
    "blocks",
    {"hidden_states": Split(POINTS), "skip_tensor": Split(POINTS)},
    attends=POINTS,
    submodule_attends={"attn2": "local"},
    unsplit_args=("conditioning", "text_states"),
    updates=("hidden_states",),
    never_skipped=True,
)
HUNYUAN_3D_2_1 = Architecture(
    name="Hunyuan 3D 2.1",
    kinds=("comfy.ldm.hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain",),
    plan=SplitPlan(
        (POINT_BLOCKS, ModulePlan("final_layer", {"x": Gather(POINTS)})),
        no_options=("comfy.ldm.hunyuan3dv2_1.hunyuandit",),
    ),
    patch=(1,),
    text_width=inputs_of("blocks.0.attn2.to_k"),
    batch_coupled=lambda net: True,  # it swaps the halves of a batch of two and more
)

# JoyImage. The parent slices references off right after the blocks, so they end full.
JOYIMAGE_BLOCKS = ModulePlan(
    "double_blocks",
    {"hidden_states": Split(IMAGE), "encoder_hidden_states": Split(TEXT), "image_rotary_emb": SplitLike(IMAGE)},
    attends=IMAGE + TEXT,
    unsplit_args=("temb",),
    gathers=True,
)
JOYIMAGE = Architecture(
    name="JoyImage",
    kinds=("comfy.ldm.joyimage.model:JoyImageTransformer3DModel",),
    plan=SplitPlan((JOYIMAGE_BLOCKS,)),
    width=lambda net: net.img_in.out_channels,
)

# Lens.
LENS_BLOCKS = ModulePlan(
    "transformer_blocks",
    {
        "encoder_hidden_states": Split(TEXT),
        "hidden_states": Split(IMAGE),
        "freqs_cis": SplitLike(IMAGE_TEXT, 2),
        "attention_mask": SplitLike(IMAGE_TEXT, -1),
    },
    attends=IMAGE_TEXT,
    unsplit_args=("temb",),
)
LENS = Architecture(
    name="Lens",
    kinds=("comfy.ldm.lens.model:LensTransformer2DModel",),
    plan=SplitPlan((LENS_BLOCKS, ModulePlan("proj_out", {0: Gather(IMAGE, after=True)}))),
    patch=(1, 1, 1),
)

# PixArt alpha and sigma. The text is read as keys only. Its attention is called without transformer_options.
PIXART_BLOCKS = ModulePlan(
    "blocks",
    {"x": Split(IMAGE)},
    attends=IMAGE,
    submodule_attends={"cross_attn": "local"},
    unsplit_args=("y", "t", "mask", "HW"),
)
PIXART_LAST = ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("t",))
PIXART = Architecture(
    name="PixArt",
    kinds=("comfy.ldm.pixart.pixartms:PixArtMS",),
    plan=SplitPlan((PIXART_BLOCKS, PIXART_LAST), no_options=("comfy.ldm.pixart.blocks",)),
)

# PixelDiT and PiD: patches with the text; then blocks of pixels, which run in full on every rank.
#
# PiD mixes what it knows of the small picture into the patches between blocks, by modules of its own.
PIXELDIT_BLOCKS = ModulePlan(
    "patch_blocks",
    {"x": Split(IMAGE), "y": Split(TEXT), "pos_img": SplitLike(IMAGE, 0), "pos_txt": SplitLike(TEXT, 0)},
    attends=TEXT + IMAGE,
    unsplit_args=("c", "attn_mask"),
    gathers=True,
)
PIXELDIT = Architecture(
    name="PixelDiT",
    kinds=("comfy.ldm.pixeldit.model:PixDiT_T2I",),
    plan=SplitPlan((PIXELDIT_BLOCKS,)),
    text_width=inputs_of("y_embedder.proj"),
)

PIXELDIT_GATES = ModulePlan(
    "lq_proj.gate_modules",
    {"x": Split(IMAGE), "lq": SplitLike(IMAGE)},
    unsplit_args=("sigma",),
    never_skipped=True,
    updates=(),
)
PID = replace(
    PIXELDIT, name="PiD", kinds=("comfy.ldm.pixeldit.pid:PidNet",), plan=SplitPlan((PIXELDIT_GATES, PIXELDIT_BLOCKS))
)

# Qwen-Image, Edit, 2509 and 2511, and Mage-Flow, which has its blocks.
QWEN_IMAGE_BLOCKS = ModulePlan(
    "transformer_blocks",
    {
        "encoder_hidden_states": Split(TEXT),
        "hidden_states": Split(IMAGE),
        "encoder_hidden_states_mask": SplitLike(TEXT),
        "image_rotary_emb": SplitLike(TEXT_IMAGE, 2),
        "timestep_zero_index": Index("image"),
    },
    attends=TEXT_IMAGE,
    unsplit_args=("temb",),
)
QWEN_IMAGE_PLAN = SplitPlan((QWEN_IMAGE_BLOCKS, ModulePlan("proj_out", {0: Gather(IMAGE, after=True)})))

QWEN_IMAGE = Architecture(
    name="Qwen-Image",
    kinds=("comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",),
    plan=QWEN_IMAGE_PLAN,
    text_width=inputs_of("txt_in"),
)
MAGE_FLOW = replace(QWEN_IMAGE, name="Mage-Flow", kinds=("comfy.ldm.mage_flow.model:MageFlowTransformer2DModel",))

# SD3 and SD3.5. Blocks of the medium model attend a second time, to the image alone.
SD3_BLOCKS = ModulePlan(
    "joint_blocks",
    {0: Split(TEXT), 1: Split(IMAGE)},
    attends=[TEXT + IMAGE, IMAGE],
    unsplit_args=("c", "use_checkpoint"),
)
SD3_PLAN = SplitPlan((SD3_BLOCKS, ModulePlan("final_layer", {"x": Gather(IMAGE, after=True)}, unsplit_args=("c",))))

SD3 = Architecture(
    name="Stable Diffusion 3",
    kinds=("comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",),
    plan=SD3_PLAN,
    text_width=inputs_of("context_embedder"),
    pooled_width=inputs_of("y_embedder.mlp.0"),
)


# ControlNets are no MODELs: each is split like the network that its residuals are added to, by rows for a UNet and by
# tokens for all others, so that no residual has to be gathered.
def _blocks_of(plan: SplitPlan, *no_options: str, **names: str) -> SplitPlan:
    """The plan of a network's blocks alone, which have other `names` in its ControlNet."""
    blocks = [replace(each, name=names.get(each.name, each.name)) for each in plan.module_plans if each.split_args]
    return SplitPlan(tuple(blocks), no_options=no_options)


_SD3_ATTENTION = "comfy.ldm.modules.diffusionmodules.mmdit"
CONTROL_PLANS: dict[str, SplitPlan] = {
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
