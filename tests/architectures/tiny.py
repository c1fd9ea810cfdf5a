"""Tiny networks of ComfyUI's own classes with random weights: three heads where the class lets it be, few layers."""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

_LEARNT = ("pos_embed", "inv_freq", "beta")  # buffers that come with the weights
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
    return torch.randn(shape, generator=_GENERATOR)


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
    return filled(network)


def filled(network: nn.Module) -> nn.Module:
    """Random weights in it."""
    seed(7)
    buffers = [(name, buffer) for name, buffer in network.named_buffers() if name.endswith(_LEARNT)]
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


def hunyuan_3d() -> nn.Module:
    return build(
        "hunyuan3d.model:Hunyuan3Dv2", image_model="hunyuan3d2", in_channels=64, context_in_dim=96, hidden_size=192,
        num_heads=3, depth=2, depth_single_blocks=2,
    )  # fmt: skip


def hunyuan_3d_21() -> nn.Module:
    return build(
        "hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain", image_model="hunyuan3d2_1", in_channels=64, hidden_size=192,
        context_dim=96, depth=5, num_heads=3, num_moe_layers=2, num_experts=4, guidance_cond_proj_dim=None,
    )  # fmt: skip


def triposplat() -> nn.Module:
    return build(
        "triposplat.model:LatentSeqMMFlowModel", image_model="triposplat", q_token_length=37, model_channels=192,
        cond_channels=96, num_blocks=3, num_head_channels=64, cond2_channels=128,
    )  # fmt: skip


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


def lllite(width: int) -> nn.Module:
    """The network of Anima LLLite, which says by its weights how large it is."""
    import comfy.ops
    from comfy.ldm.anima.lllite import AnimaLLLite

    modules = [f"lllite_dit_blocks_{n}_{part}" for n in range(2) for part in ("self_attn_q_proj", "self_attn_k_proj")]
    modules += ["lllite_dit_blocks_0_self_attn_v_proj", "lllite_dit_blocks_1_cross_attn_q_proj",
                "lllite_dit_blocks_0_mlp_layer1"]  # fmt: skip
    sizes: dict[str, Tensor] = {
        "lllite_conditioning1.conv1.weight": torch.empty(8, 3, 4, 4),
        "lllite_conditioning1.conv3.weight": torch.empty(16, 8, 4, 4),
        "lllite_conditioning1.proj.weight": torch.empty(24, 16, 1, 1),
    }
    for name in modules:
        sizes[f"{name}.down.weight"] = torch.empty(12, width)
        sizes[f"{name}.cond_to_film.weight"] = torch.empty(24, 24)
    return filled(AnimaLLLite(sizes, None, device="cpu", dtype=torch.float32, operations=comfy.ops.manual_cast))


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


def chroma_radiance() -> nn.Module:
    return build(
        "chroma_radiance.model:ChromaRadiance", image_model="chroma_radiance", in_channels=3, out_channels=3,
        context_in_dim=96, hidden_size=96, mlp_ratio=4.0, num_heads=3, depth=19, depth_single_blocks=38,
        axes_dim=[8, 12, 12], theta=10000, patch_size=4, qkv_bias=True, in_dim=64, out_dim=96, hidden_dim=64,
        n_layers=2, txt_ids_dims=[], vec_in_dim=None, nerf_hidden_size=16, nerf_mlp_ratio=2, nerf_depth=1,
        nerf_max_freqs=4, nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=None, use_x0=False,
        use_sequential_txt_ids=True,
    )  # fmt: skip


def aura_flow() -> nn.Module:
    return build(
        "aura.mmdit:MMDiT", dim=192, n_layers=4, n_double_layers=2, n_heads=3, global_conddim=192, cond_seq_dim=96,
        max_seq=64,
    )  # fmt: skip


def pixart() -> nn.Module:
    return build("pixart.pixartms:PixArtMS", hidden_size=192, depth=2, num_heads=3, caption_channels=96)


def hunyuan_dit() -> nn.Module:
    return build(
        "hydit.models:HunYuanDiT", hidden_size=192, depth=6, num_heads=3, text_states_dim=96, text_states_dim_t5=128,
        text_len=7, text_len_t5=9, size_cond=True, use_style_cond=True,
    )  # fmt: skip


def mage_flow() -> nn.Module:
    return build(
        "mage_flow.model:MageFlowTransformer2DModel", num_layers=2, attention_head_dim=64, num_attention_heads=3,
        joint_attention_dim=96, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip


def lumina_pixels() -> nn.Module:
    network = build(
        "lumina.model:NextDiTPixelSpace", patch_size=4, in_channels=3, dim=288, n_layers=2, n_refiner_layers=2,
        n_heads=6, n_kv_heads=6, axes_dims=[16, 16, 16], axes_lens=[300, 512, 512], rope_theta=256.0,
        ffn_dim_multiplier=8 / 3, z_image_modulation=True, time_scale=1000.0, qk_norm=True, cap_feat_dim=96,
        pad_tokens_multiple=32, decoder_hidden_size=64, decoder_num_res_blocks=1,
    )  # fmt: skip
    network.dec_net.final_layer.linear.weight.mul_(0.3)  # what it returns is divided by the time
    return network


def ideogram4() -> nn.Module:
    return build(
        "ideogram4.model:Ideogram4Transformer2DModel", num_layers=2, num_attention_heads=3, attention_head_dim=64,
        intermediate_size=256, adaln_dim=64, llm_features_dim=96, mrope_section=(12, 10, 10),
    )  # fmt: skip


PIXELDIT = dict(
    num_groups=3, hidden_size=192, pixel_hidden_size=8, pixel_attn_hidden_size=96, pixel_num_groups=3, patch_depth=3,
    pixel_depth=1, patch_size=4, txt_embed_dim=96, txt_max_length=40,
)  # fmt: skip


def pixeldit() -> nn.Module:
    return build("pixeldit.model:PixDiT_T2I", **PIXELDIT)


def pid() -> nn.Module:
    return build(
        "pixeldit.pid:PidNet", **PIXELDIT, lq_hidden_dim=16, lq_num_res_blocks=1, sr_scale=1,
        latent_spatial_down_factor=8, pit_lq_inject=True, rope_ref_h=64, rope_ref_w=64,
    )  # fmt: skip


def cosmos1() -> nn.Module:
    return build(
        "cosmos.model:GeneralDIT", max_img_h=64, max_img_w=64, max_frames=16, in_channels=16, out_channels=16,
        patch_spatial=2, patch_temporal=1, model_channels=192, num_blocks=2, num_heads=3, crossattn_emb_channels=96,
        pos_emb_cls="rope3d", use_adaln_lora=True, adaln_lora_dim=32, affline_emb_norm=True, block_x_format="THWBD",
        extra_per_block_abs_pos_emb=True, extra_per_block_abs_pos_emb_type="learnable",
    )  # fmt: skip


def mochi() -> nn.Module:
    return build(
        "genmo.joint_model.asymm_models_joint:AsymmDiTJoint", patch_size=2, in_channels=12, hidden_size_x=192,
        hidden_size_y=96, depth=2, num_heads=3, mlp_ratio_x=64.0, mlp_ratio_y=4.0, use_t5=True, t5_feat_dim=96,
        learn_sigma=False, timestep_scale=1000.0, qk_norm=True, qkv_bias=False, out_bias=True, timestep_mlp_bias=True,
        patch_embed_bias=True,
    )  # fmt: skip


def minimax_h3(**changes: Any) -> nn.Module:
    return build(
        "minimax.model:MiniMaxH3Model", hidden_size=192, num_layers=2, token_refiner_num_layers=1,
        num_attention_heads=3, attention_head_dim=64, ffn_hidden_size=256, text_dim=96, timestep_input_dim=64,
        time_embed_hidden_size=64, time_embed_dim=64, rope_inv_freq_len=8, **changes,
    )  # fmt: skip


def hidream_o1(keeps: bool = True) -> nn.Module:
    """`keeps`: keys of what comes before the picture, for later calls."""
    network = build(
        "hidream_o1.model:HiDreamO1Transformer",
        text_config_overrides=dict(
            vocab_size=151936, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, rope_dims=[12, 10, 10],
        ),
        vision_config_overrides=dict(
            hidden_size=64, num_heads=2, intermediate_size=64, depth=1, num_position_embeddings=64,
        ),
    )  # fmt: skip
    if not keeps:
        network.register_forward_pre_hook(lambda net, _: net.clear_kv_cache())
    return network


STABLE_AUDIO = dict(
    io_channels=16, embed_dim=192, cond_token_dim=64, project_cond_tokens=False, global_cond_dim=64, depth=2,
    num_heads=3,
)  # fmt: skip
STABLE_AUDIO_3 = dict(
    num_memory_tokens=3, attn_kwargs={"qk_norm": "rms", "differential": True}, norm_type="rms_norm",
    local_add_cond_dim=17, global_cond_shared_embed=True, global_cond_type="adaLN", timestep_features_type="expo",
)  # fmt: skip


def stable_audio(**changes: Any) -> nn.Module:
    return build("audio.dit:AudioDiffusionTransformer", **STABLE_AUDIO | changes)


def stable_audio_3(**changes: Any) -> nn.Module:
    return stable_audio(**STABLE_AUDIO_3 | changes)


class _Faces(nn.Module):
    """In place of the encoder of faces, 25 million weights on pictures of 512 pixels, which runs before any cut."""

    def get_motion(self, pictures: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(pictures[:, :2], 16).flatten(1)


def wan_animate(faces: bool = True) -> nn.Module:
    config = WAN | dict(model_type="animate", in_dim=36, num_layers=10)
    network = build("wan.model_animate:AnimateWanModel", **config)
    if not faces:
        network.motion_encoder = _Faces()
    return network


def wan_animate_2() -> nn.Module:
    return build("wan.model_animate2:WanAnimate2Model", **WAN | dict(model_type="animate2", in_dim=36))


def seedvr2() -> nn.Module:
    return build(
        "seedvr.model:NaDiT", norm_eps=1e-5, num_layers=4, mlp_type="swiglu", vid_dim=256, heads=2, mm_layers=2,
        vid_out_norm=True,
    )  # fmt: skip


def wan_s2v() -> nn.Module:
    return wan("WanModel_S2V", model_type="s2v", audio_dim=48, audio_inject_layers=[0, 1])


def wan_dancer() -> nn.Module:
    return build(
        "wan.model_wandancer:WanDancerModel", **WAN | dict(model_type="wandancer", in_dim=36, audio_inject_layers=[0]),
        music_latent_dim=256,
    )  # fmt: skip


def causal_wan() -> nn.Module:
    return build("wan.ar_model:CausalWanModel", **WAN)


def ace_step15() -> nn.Module:
    return build(
        "ace.ace_step15:AceStepConditionGenerationModel", hidden_size=192, text_hidden_dim=96, num_dit_layers=3,
        num_lyric_layers=1, num_timbre_layers=1, num_tokenizer_layers=1, num_heads=4, num_kv_heads=2, head_dim=64,
        intermediate_size=256, sliding_window=5, fsq_dim=192, encoder_hidden_size=192, encoder_intermediate_size=256,
        encoder_num_heads=4,
    )  # fmt: skip


def ace_step() -> nn.Module:
    """ComfyUI fixes the width of its encoder of lyrics: a small one is put in its place."""
    import comfy.ops

    small = {"dtype": _COMPUTED_IN[0], "device": "cpu", "operations": comfy.ops.disable_weight_init}
    network = kind_of("ace.model:ACEStepTransformer2DModel")(
        num_layers=2, attention_head_dim=32, num_attention_heads=3, text_embedding_dim=96, lyric_encoder_vocab_size=50,
        lyric_hidden_size=48, ssl_encoder_depths=[1, 1], ssl_latent_dims=[16, 12], max_position=64, **small,
    )  # fmt: skip
    network.lyric_encoder = kind_of("ace.lyric_encoder:ConformerEncoder")(
        48, 48, 3, 64, 1, static_chunk_size=0, **small
    )
    return filled(network.eval())


def minimax_music() -> nn.Module:
    """ComfyUI fixes its widths: layers of these are put in place of those that make it large."""
    import comfy.ops

    kind = kind_of("minimax_music.dit:MiniMaxMusic3DiT")
    wide = {"dtype": _COMPUTED_IN[0], "operations": comfy.ops.disable_weight_init}
    network = kind(device="meta", **wide)
    inner, transformer = network.diffusion_transformer, network.diffusion_transformer.transformer
    block = type(transformer.layers[0])
    transformer.layers = nn.ModuleList(block(192, 64, 256, device="cpu", **wide) for _ in range(2))
    transformer.project_in, transformer.project_out = nn.Linear(2304, 192, bias=False), nn.Linear(192, 128, bias=False)
    inner.to_timestep_embed = nn.Sequential(nn.Linear(256, 192), nn.SiLU(), nn.Linear(192, 192))
    return filled(network.to_empty(device="cpu").eval())


STAGE_C: dict[str, Any] = {
    "c_in": 4, "c_out": 4, "c_r": 16, "c_cond": 32, "c_hidden": [48, 48], "nhead": [3, 3], "blocks": [[1, 2], [2, 1]],
    "c_clip_text": 24, "c_clip_text_pooled": 24, "c_clip_img": 20, "stable_cascade_stage": "c",
}  # fmt: skip
STAGE_B: dict[str, Any] = {
    "c_in": 4, "c_out": 4, "c_r": 16, "c_cond": 32, "c_hidden": [16, 24, 48], "nhead": [-1, 3, 3],
    "blocks": [[1, 1, 2], [2, 1, 1]], "block_repeat": [[1, 1, 1], [2, 2, 1]], "level_config": ["CT", "CTA", "CTAF"],
    "c_clip": 24, "c_effnet": 5, "dropout": [0, 0, 0], "stable_cascade_stage": "b",
}  # fmt: skip
CASCADE = {"stage C": ("cascade.stage_c:StageC", STAGE_C), "stage B": ("cascade.stage_b:StageB", STAGE_B)}


def cascade(stage: str, **changes: Any) -> nn.Module:
    kind, config = CASCADE[stage]
    return build(kind, **config | changes)
