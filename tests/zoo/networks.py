"""The table of tiny networks: classes of ComfyUI's, with three heads where the class lets it be, and few layers.
UNets are in unets.py.

`make` of tiny.py makes a row, files.py writes it into a file of its name. Nothing here needs ComfyUI.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Network:
    """`kind` is "module:name" below comfy, `model` the class of comfy.supported_models that its file is loaded as,
    `beside` are the shapes of weights that the file has beside the network, `scaled` factors of some weights."""

    kind: str
    config: Config
    model: str = ""
    beside: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scaled: dict[str, float] = field(default_factory=dict)


def of(kind: str, model: str = "", **config: Any) -> Network:
    return Network(kind=f"ldm.{kind}", config=config, model=model)


def flux(model: str, config: Config | None = None, **changes: Any) -> Network:
    return of("flux.model:Flux", model, **(config or FLUX) | changes)


def wan(model: str, kind: str = "model:WanModel", **changes: Any) -> Network:
    return of(f"wan.{kind}", model, **WAN | changes)


def seconds(name: str, learned: bool) -> dict[str, tuple[int, ...]]:
    """What turns a piece's start or length into a condition."""
    stem = f"conditioner.conditioners.seconds_{name}.embedder.embedding"
    shapes = {f"{stem}.1.weight": (768, 256 + learned), f"{stem}.1.bias": (768,)}
    return shapes | ({f"{stem}.0.weights": (128,)} if learned else {})


FLUX = dict(
    image_model="flux", in_channels=16, out_channels=16, vec_in_dim=64, context_in_dim=96, hidden_size=192,
    mlp_ratio=4.0, num_heads=3, depth=2, depth_single_blocks=2, axes_dim=[16, 24, 24], theta=10000, patch_size=2,
    qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
FLUX2 = FLUX | dict(
    in_channels=128, out_channels=128, vec_in_dim=None, axes_dim=[16, 16, 16, 16], theta=2000, patch_size=1,
    qkv_bias=False, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False, mlp_ratio=3.0,
)  # fmt: skip
CHROMA = dict(
    context_in_dim=96, hidden_size=96, mlp_ratio=4.0, num_heads=3, depth=19, depth_single_blocks=38,
    axes_dim=[8, 12, 12], theta=10000, qkv_bias=True, in_dim=64, out_dim=96, hidden_dim=64, n_layers=2,
    txt_ids_dims=[], vec_in_dim=None,
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
COSMOS = dict(
    max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1,
    model_channels=192, num_blocks=2, num_heads=3, crossattn_emb_channels=96, pos_emb_cls="rope3d", use_adaln_lora=True,
    adaln_lora_dim=32,
)  # fmt: skip
QWEN = dict(
    num_layers=2, attention_head_dim=64, num_attention_heads=3, joint_attention_dim=96, axes_dims_rope=(16, 24, 24)
)
LUMINA = dict(
    patch_size=2, in_channels=16, dim=288, n_layers=2, n_refiner_layers=2, n_heads=6, n_kv_heads=6,
    axes_dims=[16, 16, 16], axes_lens=[300, 512, 512], rope_theta=256.0, ffn_dim_multiplier=8 / 3,
    z_image_modulation=True, time_scale=1000.0, qk_norm=True, cap_feat_dim=96, pad_tokens_multiple=32,
)  # fmt: skip
SD3 = dict(
    input_size=None, patch_size=2, in_channels=16, depth=3, adm_in_channels=64, num_patches=32 * 32,
    pos_embed_max_size=32, qk_norm="rms",
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 96, "out_features": 192}},
)  # fmt: skip
POOLED_SD3 = 2048  # ComfyUI's loader writes it into SD3.5's ControlNets
SD35_CONTROL = dict(
    img_size=None, patch_size=2, in_chans=16, attention_head_dim=64, num_attention_heads=3, adm_in_channels=64,
    num_layers=2, main_model_double=3,
)  # fmt: skip
KANDINSKY = dict(
    in_text_dim=96, in_text_dim2=64, time_dim=64, model_dim=192, ff_dim=256, num_visual_blocks=2,
    axes_dims=(16, 24, 24),
)  # fmt: skip
HUNYUAN_DIT = dict(hidden_size=192, num_heads=3, text_states_dim=96, text_states_dim_t5=128, text_len=7, text_len_t5=9)
PIXELDIT = dict(
    num_groups=3, hidden_size=192, pixel_hidden_size=8, pixel_attn_hidden_size=96, pixel_num_groups=3, patch_depth=3,
    pixel_depth=1, patch_size=4, txt_embed_dim=96, txt_max_length=40,
)  # fmt: skip
STABLE_AUDIO = dict(
    io_channels=64, embed_dim=192, cond_token_dim=768, project_cond_tokens=True, global_cond_dim=1536, depth=2,
    num_heads=3,
)  # fmt: skip
STABLE_AUDIO_3 = STABLE_AUDIO | dict(
    io_channels=256, global_cond_dim=768, num_memory_tokens=3, attn_kwargs={"qk_norm": "rms", "differential": True},
    norm_type="rms_norm", local_add_cond_dim=257, global_cond_shared_embed=True, global_cond_type="adaLN",
    timestep_features_type="expo",
)  # fmt: skip

NETWORKS: dict[str, Network] = {
    "flux": flux("Flux"),
    "flux_fill": flux("FluxInpaint", in_channels=96),
    "flux_depth": flux("Flux", in_channels=32),
    "flux2": flux("Flux2", FLUX2),
    "flux2_klein": flux("Flux2", FLUX2, guidance_embed=False),
    "longcat": flux("LongCatImage", guidance_embed=False, vec_in_dim=None, txt_ids_dims=[1, 2]),
    "ovis": flux("FluxSchnell", guidance_embed=False, vec_in_dim=None, txt_ids_dims=[1, 2], yak_mlp=True),
    "chroma": of(
        "chroma.model:Chroma", "Chroma", image_model="chroma", in_channels=64, out_channels=64, patch_size=2, **CHROMA
    ),
    "chroma_radiance": of(
        "chroma_radiance.model:ChromaRadiance", "ChromaRadiance", image_model="chroma_radiance", in_channels=3,
        out_channels=3, patch_size=4, nerf_hidden_size=16, nerf_mlp_ratio=2, nerf_depth=1, nerf_max_freqs=4,
        nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=None, use_x0=False,
        use_sequential_txt_ids=True, **CHROMA,
    ),
    "wan": wan("WAN21_T2V"),
    "wan_i2v": wan("WAN21_I2V", model_type="i2v", in_dim=36),
    "wan_first_and_last_frame": wan("WAN21_I2V", model_type="i2v", in_dim=36, flf_pos_embed_token_number=514),
    "wan_5b": wan("WAN22_T2V", in_dim=48, out_dim=48),
    "wan_vace": wan("WAN21_Vace", "model:VaceWanModel", vace_layers=2, vace_in_dim=96, num_layers=4),
    "wan_camera": wan("WAN21_Camera", "model:CameraWanModel", model_type="camera", in_dim=32),
    "wan_fun_control": wan("WAN21_FunControl2V", model_type="i2v", in_dim=48, in_dim_ref_conv=16),
    "wan22_i2v": wan("WAN21_I2V", in_dim=36),
    "wan22_camera": wan("WAN22_Camera", "model:CameraWanModel", model_type="camera_2.2", in_dim=36),
    "wan22_fun_control": wan("WAN21_FunControl2V", in_dim=52, in_dim_ref_conv=16),
    "wan22_fun_control_5b": wan("WAN22_T2V", in_dim=148, out_dim=48, in_dim_ref_conv=48),
    "wan_talking": wan("WAN21_T2V", dim=240),  # 40 heads of its voices go into that
    "wan_talking_i2v": wan("WAN21_I2V", model_type="i2v", in_dim=36, dim=240),
    "wan_scail": wan("WAN21_SCAIL", "model:SCAILWanModel", model_type="scail", in_dim=20),
    "wan_scail_2": wan("WAN21_SCAIL2", "model:SCAIL2WanModel", model_type="scail2", in_dim=20),
    "wan_animate": wan(
        "WAN22_Animate", "model_animate:AnimateWanModel", model_type="animate", in_dim=36, num_layers=10
    ),
    "wan_animate_2": wan("WAN_Animate2", "model_animate2:WanAnimate2Model", model_type="animate2", in_dim=36),
    "wan_s2v": wan("WAN22_S2V", "model:WanModel_S2V", model_type="s2v", audio_dim=48, audio_inject_layers=[0, 1]),
    "humo": wan("WAN21_HuMo", "model:HumoWanModel", model_type="humo"),
    "wandancer": wan(
        "WAN22_WanDancer", "model_wandancer:WanDancerModel", model_type="wandancer", in_dim=36,
        audio_inject_layers=[0], music_latent_dim=256,
    ),
    "causal_wan": wan("WAN21_CausalAR_T2V", "ar_model:CausalWanModel"),
    "qwen": of("qwen_image.model:QwenImageTransformer2DModel", "QwenImage", **QWEN),
    "qwen_narrow": of(
        "qwen_image.model:QwenImageTransformer2DModel", "QwenImage", **QWEN | dict(
            attention_head_dim=32, num_attention_heads=4, axes_dims_rope=[8, 12, 12])
    ),
    "mage_flow": of("mage_flow.model:MageFlowTransformer2DModel", "MageFlow", **QWEN),
    "z_image": of("lumina.model:NextDiT", "ZImage", **LUMINA),
    "lumina2": of(
        "lumina.model:NextDiT", "Lumina2", **LUMINA | dict(
            n_kv_heads=2, z_image_modulation=False, time_scale=1.0, pad_tokens_multiple=None)
    ),
    "z_image_pixels": Network(
        kind="ldm.lumina.model:NextDiTPixelSpace", model="ZImagePixelSpace", config=LUMINA | dict(
            patch_size=4, in_channels=3, decoder_hidden_size=64, decoder_num_res_blocks=1),
        scaled={"dec_net.final_layer.linear.weight": 0.3},  # what it returns is divided by the time
    ),
    "sd35_large": of(
        "modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper", "SD3", x_block_self_attn_layers=[], **SD3
    ),
    "sd35_medium": of(
        "modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper", "SD3", x_block_self_attn_layers=[0, 1], **SD3
    ),
    "sd35": of(
        "modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper", "SD3", x_block_self_attn_layers=[],
        **SD3 | dict(adm_in_channels=POOLED_SD3),
    ),
    "hunyuan": of("hunyuan_video.model:HunyuanVideo", "HunyuanVideo", **HUNYUAN),
    "hunyuan_15": of(
        "hunyuan_video.model:HunyuanVideo", "HunyuanVideo15", **HUNYUAN | dict(
            depth_single_blocks=0, vec_in_dim=None, byt5=True, use_cond_type_embedding=True, vision_in_dim=48,
            guidance_embed=False, patch_size=[1, 1, 1], in_channels=65, out_channels=32)
    ),
    "hunyuan_dit": of(
        "hydit.models:HunYuanDiT", "HunyuanDiT1", depth=6, size_cond=True, use_style_cond=True, **HUNYUAN_DIT
    ),
    "hunyuan_3d": of(
        "hunyuan3d.model:Hunyuan3Dv2", "Hunyuan3Dv2", image_model="hunyuan3d2", in_channels=64, context_in_dim=96,
        hidden_size=192, num_heads=3, depth=2, depth_single_blocks=2,
    ),
    "hunyuan_3d_21": of(
        "hunyuan3dv2_1.hunyuandit:HunYuanDiTPlain", "Hunyuan3Dv2_1", image_model="hunyuan3d2_1", in_channels=64,
        hidden_size=192, context_dim=96, depth=5, num_heads=3, num_moe_layers=2, num_experts=4,
        guidance_cond_proj_dim=None,
    ),
    "triposplat": of(
        "triposplat.model:LatentSeqMMFlowModel", "TripoSplat", image_model="triposplat", q_token_length=37,
        model_channels=192, cond_channels=96, num_blocks=3, num_head_channels=64, cond2_channels=128,
    ),
    "ltxv": of(
        "lightricks.model:LTXVModel", "LTXV", cross_attention_dim=192, attention_head_dim=48, num_attention_heads=4,
        caption_channels=96, num_layers=2,
    ),
    "ltx2": of(
        "lightricks.av_model:LTXAVModel", "LTXAV", cross_attention_dim=192, attention_head_dim=48,
        num_attention_heads=4, audio_cross_attention_dim=96, audio_attention_head_dim=24, audio_num_attention_heads=4,
        caption_channels=96, num_layers=2, use_middle_indices_grid=True, connector_attention_head_dim=32,
        connector_num_attention_heads=3, connector_num_layers=1,
    ),
    "cosmos_predict2": of("cosmos.predict2:MiniTrainDIT", "CosmosT2IPredict2", **COSMOS),
    "anima": of("anima.model:Anima", "Anima", **COSMOS | dict(crossattn_emb_channels=1024)),
    "cosmos1": of(
        "cosmos.model:GeneralDIT", "CosmosT2V", **COSMOS | dict(
            max_img_h=64, max_img_w=64, max_frames=16, affline_emb_norm=True, block_x_format="THWBD",
            extra_per_block_abs_pos_emb=True, extra_per_block_abs_pos_emb_type="learnable")
    ),
    "hidream": of(
        "hidream.model:HiDreamImageTransformer2DModel", "HiDream", patch_size=2, in_channels=16, out_channels=16,
        num_layers=2, num_single_layers=2, attention_head_dim=64, num_attention_heads=3, caption_channels=[96, 80],
        text_emb_dim=64, num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(32, 16, 16),
        max_resolution=(128, 128), llama_layers=[0, 1, 2, 2],
    ),
    "hidream_o1": of(
        "hidream_o1.model:HiDreamO1Transformer", "HiDreamO1",
        text_config_overrides=dict(
            vocab_size=151936, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, rope_dims=[12, 10, 10],
        ),
        vision_config_overrides=dict(
            hidden_size=64, num_heads=2, intermediate_size=64, depth=1, num_position_embeddings=64,
        ),
    ),
    "kandinsky5": of("kandinsky5.model:Kandinsky5", "Kandinsky5", visual_embed_dim=132, **KANDINSKY),
    "kandinsky5_image": of("kandinsky5.model:Kandinsky5", "Kandinsky5Image", visual_embed_dim=64, **KANDINSKY),
    "omnigen2": of(
        "omnigen.omnigen2:OmniGen2Transformer2DModel", "Omnigen2", hidden_size=192, num_layers=2,
        num_refiner_layers=2, num_attention_heads=4, num_kv_heads=2, axes_dim_rope=(16, 16, 16), text_feat_dim=96,
    ),
    "boogu": of(
        "boogu.model:BooguTransformer2DModel", "Boogu", hidden_size=192, num_layers=2, num_double_stream_layers=2,
        num_attention_heads=4, num_kv_heads=2, axes_dim_rope=(16, 16, 16), instruction_feat_dim=96,
    ),
    "ernie_image": of(
        "ernie.model:ErnieImageModel", "ErnieImage", hidden_size=192, num_attention_heads=3, num_layers=2,
        ffn_hidden_size=256, text_in_dim=96, rope_axes_dim=(16, 24, 24),
    ),
    "krea2": of(
        "krea2.model:SingleStreamDiT", "Krea2", features=192, tdim=64, txtdim=96, heads=6, kvheads=2, layers=2,
        txtlayers=2, txtheads=3, txtkvheads=3, multiplier=2,
    ),
    "joyimage": of(
        "joyimage.model:JoyImageTransformer3DModel", "JoyImage", hidden_size=192, num_attention_heads=3, text_dim=96,
        num_layers=2, rope_dim_list=[16, 24, 24],
    ),
    "cogvideox": of(
        "cogvideo.model:CogVideoXTransformer3DModel", "CogVideoX_T2V", num_attention_heads=3, attention_head_dim=64,
        time_embed_dim=64, text_embed_dim=96, num_layers=2, use_rotary_positional_embeddings=True, sample_width=14,
        sample_height=10, sample_frames=9,
    ),
    "lens": of(
        "lens.model:LensTransformer2DModel", "Lens", in_channels=128, out_channels=32, num_layers=2,
        attention_head_dim=64, num_attention_heads=3, enc_hidden_dim=96, selected_layer_index=(0, 1),
        axes_dims_rope=(16, 24, 24),
    ),
    "aura_flow": of(
        "aura.mmdit:MMDiT", "AuraFlow", dim=192, n_layers=4, n_double_layers=2, n_heads=3, global_conddim=192,
        cond_seq_dim=96, max_seq=64,
    ),
    "pixart": of(
        "pixart.pixartms:PixArtMS", "PixArtSigma", hidden_size=192, depth=2, num_heads=3, caption_channels=96
    ),
    "ideogram4": of(
        "ideogram4.model:Ideogram4Transformer2DModel", "Ideogram4", num_layers=2, num_attention_heads=3,
        attention_head_dim=64, intermediate_size=256, adaln_dim=64, llm_features_dim=96, mrope_section=(12, 10, 10),
    ),
    "pixeldit": of("pixeldit.model:PixDiT_T2I", "PixelDiTT2I", **PIXELDIT),
    "pid": of(
        "pixeldit.pid:PidNet", "PiD", lq_hidden_dim=16, lq_num_res_blocks=1, sr_scale=1, latent_spatial_down_factor=8,
        pit_lq_inject=True, rope_ref_h=64, rope_ref_w=64, **PIXELDIT,
    ),
    "mochi": of(
        "genmo.joint_model.asymm_models_joint:AsymmDiTJoint", "GenmoMochi", patch_size=2, in_channels=12,
        hidden_size_x=192, hidden_size_y=96, depth=2, num_heads=3, mlp_ratio_x=64.0, mlp_ratio_y=4.0, use_t5=True,
        t5_feat_dim=96, learn_sigma=False, timestep_scale=1000.0, qk_norm=True, qkv_bias=False, out_bias=True,
        timestep_mlp_bias=True, patch_embed_bias=True,
    ),
    "minimax_h3": of(
        "minimax.model:MiniMaxH3Model", "MiniMaxH3", hidden_size=192, num_layers=2, token_refiner_num_layers=1,
        num_attention_heads=3, attention_head_dim=64, ffn_hidden_size=256, text_dim=96, timestep_input_dim=64,
        time_embed_hidden_size=64, time_embed_dim=64, rope_inv_freq_len=8,
    ),
    "seedvr2": of(
        "seedvr.model:NaDiT", "SeedVR2", norm_eps=1e-5, num_layers=4, mlp_type="swiglu", vid_dim=256, heads=2,
        mm_layers=2, vid_out_norm=True,
    ),
    "ace_step_15": of(
        "ace.ace_step15:AceStepConditionGenerationModel", "ACEStep15", hidden_size=192, text_hidden_dim=96,
        num_dit_layers=3, num_lyric_layers=1, num_timbre_layers=1, num_tokenizer_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=64, intermediate_size=256, sliding_window=5, fsq_dim=192, encoder_hidden_size=192,
        encoder_intermediate_size=256, encoder_num_heads=4,
    ),
    "stable_audio": Network(
        kind="ldm.audio.dit:AudioDiffusionTransformer", model="StableAudio", config=STABLE_AUDIO,
        beside=seconds("start", learned=True) | seconds("total", learned=True),
    ),
    "stable_audio_3": Network(
        kind="ldm.audio.dit:AudioDiffusionTransformer", model="StableAudio3", config=STABLE_AUDIO_3,
        beside=seconds("total", learned=False),
    ),
}  # fmt: skip
NETWORKS |= {  # other names of a row, where it is prompted otherwise
    name: NETWORKS[row] for name, row in {
        "flux_kontext": "flux", "flux_uso": "flux", "flux_redux": "flux", "flux2_references": "flux2",
        "wan_phantom": "wan", "qwen_edit": "qwen", "qwen_edit_2511": "qwen", "hunyuan_i2v": "hunyuan",
        "minimax_h3_keyframes": "minimax_h3", "minimax_h3_references": "minimax_h3",
    }.items()
}  # fmt: skip
