"""Tiny networks of ComfyUI's own classes with random weights: three heads where the class lets it be, few layers."""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

_GENERATOR = torch.Generator()
_COMPUTED_IN = [torch.float32]


def start_comfyui() -> None:
    """Make `comfy` importable, in float32 on the CPU."""
    sys.path.append(os.environ["COMFYUI_PATH"])
    arguments, sys.argv = sys.argv, ["main.py", "--cpu", "--force-fp32", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args  # reads them

    sys.argv = arguments


def seed(number: int) -> None:
    _GENERATOR.manual_seed(number)


def computed_in(dtype: torch.dtype) -> None:
    """What networks that are built from now on are told to compute in; some keep weights in float32 all the same."""
    _COMPUTED_IN[:] = [dtype]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=_GENERATOR)


def kind_of(path: str) -> Any:
    """The class "module:name" below comfy.ldm."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"comfy.ldm.{module}"), name)


def build(path: str, **config: Any) -> nn.Module:
    """A network of class `path`, "module:name" below comfy.ldm."""
    import comfy.ops

    network: nn.Module = kind_of(path)(
        **config, dtype=_COMPUTED_IN[0], device="cpu", operations=comfy.ops.disable_weight_init
    ).eval()
    network.unet_config = config  # type: ignore[assignment]  # what a file of it says of itself
    seed(7)
    buffers = [(name, buffer) for name, buffer in network.named_buffers() if name == "pos_embed"]
    for name, tensor in [*network.named_parameters(), *buffers]:
        if tensor.ndim >= 2:
            value = normal(*tensor.shape) / math.sqrt(tensor[0].numel())
        else:
            value = normal(*tensor.shape) * 0.1 + (1 if name.endswith(("weight", "scale")) else 0)
        tensor.data = value.to(tensor.dtype)
    return network.requires_grad_(False)


FLUX = dict(
    image_model="flux", in_channels=16, out_channels=16, vec_in_dim=64, context_in_dim=96, hidden_size=192,
    mlp_ratio=4.0, num_heads=3, depth=2, depth_single_blocks=2, axes_dim=[16, 24, 24], theta=10000, patch_size=2,
    qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
FLUX2 = FLUX | dict(
    in_channels=128, out_channels=128, vec_in_dim=None, axes_dim=[16, 16, 16, 16], theta=2000, patch_size=1,
    qkv_bias=False, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False, mlp_ratio=3.0,
)  # fmt: skip
WAN = dict(
    model_type="t2v", in_dim=16, dim=192, ffn_dim=256, freq_dim=64, text_dim=96, out_dim=16, num_heads=3, num_layers=2
)
HUNYUAN = dict(
    image_model="hunyuan_video", in_channels=16, out_channels=16, vec_in_dim=64, context_in_dim=96, hidden_size=192,
    mlp_ratio=4.0, num_heads=3, depth=2, depth_single_blocks=2, axes_dim=[16, 24, 24], theta=256, patch_size=[1, 2, 2],
    qkv_bias=True, guidance_embed=True, byt5=False, meanflow=False, use_cond_type_embedding=False, vision_in_dim=None,
    meanflow_sum=False,
)  # fmt: skip
HUNYUAN_15 = dict(
    depth_single_blocks=0, vec_in_dim=None, byt5=True, use_cond_type_embedding=True, vision_in_dim=48,
    guidance_embed=False, patch_size=[1, 1, 1],
)  # fmt: skip
COSMOS = dict(
    max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1,
    model_channels=192, num_blocks=2, num_heads=3, crossattn_emb_channels=96, pos_emb_cls="rope3d", use_adaln_lora=True,
    adaln_lora_dim=32,
)  # fmt: skip


def flux(**changes: Any) -> nn.Module:
    return build("flux.model:Flux", **FLUX | changes)


def flux2(**changes: Any) -> nn.Module:
    return build("flux.model:Flux", **FLUX2 | changes)


def chroma() -> nn.Module:
    return build(
        "chroma.model:Chroma", image_model="chroma", in_channels=64, out_channels=64, context_in_dim=96, hidden_size=96,
        mlp_ratio=4.0, num_heads=3, depth=19, depth_single_blocks=38, axes_dim=[8, 12, 12], theta=10000, patch_size=2,
        qkv_bias=True, in_dim=64, out_dim=96, hidden_dim=64, n_layers=2, txt_ids_dims=[], vec_in_dim=None,
    )  # fmt: skip


def wan(kind: str = "WanModel", **changes: Any) -> nn.Module:
    return build(f"wan.model:{kind}", **WAN | changes)


def qwen() -> nn.Module:
    return build(
        "qwen_image.model:QwenImageTransformer2DModel", num_layers=2, attention_head_dim=64, num_attention_heads=3,
        joint_attention_dim=96, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip


def lumina(z_image: bool) -> nn.Module:
    return build(
        "lumina.model:NextDiT", patch_size=2, in_channels=16, dim=288, n_layers=2, n_refiner_layers=2, n_heads=6,
        n_kv_heads=6 if z_image else 2, axes_dims=[16, 16, 16], axes_lens=[300, 512, 512], rope_theta=256.0,
        ffn_dim_multiplier=8 / 3, z_image_modulation=z_image, time_scale=1000.0 if z_image else 1.0, qk_norm=True,
        cap_feat_dim=96, pad_tokens_multiple=32 if z_image else None,
    )  # fmt: skip


def sd3(twice: bool = False) -> nn.Module:
    context = {"target": "torch.nn.Linear", "params": {"in_features": 96, "out_features": 192}}
    return build(
        "modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper", input_size=None, patch_size=2, in_channels=16,
        depth=3, adm_in_channels=64, num_patches=32 * 32, pos_embed_max_size=32, qk_norm="rms",
        context_embedder_config=context, x_block_self_attn_layers=[0, 1] if twice else [],
    )  # fmt: skip


def hunyuan(**changes: Any) -> nn.Module:
    return build("hunyuan_video.model:HunyuanVideo", **HUNYUAN | changes)


def ltxv() -> nn.Module:
    return build(
        "lightricks.model:LTXVModel", cross_attention_dim=192, attention_head_dim=48, num_attention_heads=4,
        caption_channels=96, num_layers=2,
    )  # fmt: skip


def ltxav(**changes: Any) -> nn.Module:
    return build(
        "lightricks.av_model:LTXAVModel", cross_attention_dim=192, attention_head_dim=48, num_attention_heads=4,
        audio_cross_attention_dim=96, audio_attention_head_dim=24, audio_num_attention_heads=4, caption_channels=96,
        num_layers=2, use_middle_indices_grid=True, connector_attention_head_dim=32, connector_num_attention_heads=3,
        connector_num_layers=1, **changes,
    )  # fmt: skip


def cosmos() -> nn.Module:
    return build("cosmos.predict2:MiniTrainDIT", **COSMOS)


def anima() -> nn.Module:
    return build("anima.model:Anima", **COSMOS | dict(crossattn_emb_channels=1024))


def hidream() -> nn.Module:
    return build(
        "hidream.model:HiDreamImageTransformer2DModel", patch_size=2, in_channels=16, out_channels=16, num_layers=2,
        num_single_layers=2, attention_head_dim=64, num_attention_heads=3, caption_channels=[96, 80], text_emb_dim=64,
        num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(32, 16, 16), max_resolution=(128, 128),
        llama_layers=[0, 1, 2, 2],
    )  # fmt: skip


def kandinsky5(visual_embed_dim: int = 64) -> nn.Module:
    return build(
        "kandinsky5.model:Kandinsky5", in_text_dim=96, in_text_dim2=64, time_dim=64, model_dim=192, ff_dim=256,
        visual_embed_dim=visual_embed_dim, num_visual_blocks=2, axes_dims=(16, 24, 24),
    )  # fmt: skip


def omnigen2() -> nn.Module:
    return build(
        "omnigen.omnigen2:OmniGen2Transformer2DModel", hidden_size=192, num_layers=2, num_refiner_layers=2,
        num_attention_heads=4, num_kv_heads=2, axes_dim_rope=(16, 16, 16), text_feat_dim=96,
    )  # fmt: skip


def boogu() -> nn.Module:
    return build(
        "boogu.model:BooguTransformer2DModel", hidden_size=192, num_layers=2, num_double_stream_layers=2,
        num_attention_heads=4, num_kv_heads=2, axes_dim_rope=(16, 16, 16), instruction_feat_dim=96,
    )  # fmt: skip


def ernie_image() -> nn.Module:
    return build(
        "ernie.model:ErnieImageModel", hidden_size=192, num_attention_heads=3, num_layers=2, ffn_hidden_size=256,
        text_in_dim=96, rope_axes_dim=(16, 24, 24),
    )  # fmt: skip


def krea2() -> nn.Module:
    return build(
        "krea2.model:SingleStreamDiT", features=192, tdim=64, txtdim=96, heads=6, kvheads=2, layers=2, txtlayers=2,
        txtheads=3, txtkvheads=3, multiplier=2,
    )  # fmt: skip


def joyimage() -> nn.Module:
    return build(
        "joyimage.model:JoyImageTransformer3DModel", hidden_size=192, num_attention_heads=3, text_dim=96, num_layers=2,
        rope_dim_list=[16, 24, 24],
    )  # fmt: skip


def cogvideox() -> nn.Module:
    return build(
        "cogvideo.model:CogVideoXTransformer3DModel", num_attention_heads=3, attention_head_dim=64, time_embed_dim=64,
        text_embed_dim=96, num_layers=2, use_rotary_positional_embeddings=True, sample_width=14, sample_height=10,
        sample_frames=9,
    )  # fmt: skip


def lens() -> nn.Module:
    return build(
        "lens.model:LensTransformer2DModel", in_channels=128, out_channels=32, num_layers=2, attention_head_dim=64,
        num_attention_heads=3, enc_hidden_dim=96, selected_layer_index=(0, 1), axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
