"""The files that the workflows name, as their publishers call them."""

from __future__ import annotations

from .graph import File

FLUX_TEXT = "comfyanonymous/flux_text_encoders"
WAN_21 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged:split_files"
WAN_22 = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged:split_files"
QWEN = "Comfy-Org/Qwen-Image_ComfyUI:split_files"
MINIMAX = "Comfy-Org/MiniMax-H3:"
HUNYUAN = "Comfy-Org/HunyuanVideo_1.5_repackaged:split_files"


def _file(folder: str, source: str) -> File:
    return File(name=source.replace(":", "/").rpartition("/")[2], folder=folder, source=source)


def _below(start: str, folder: str, name: str) -> File:
    return _file(folder, f"{start}/{folder}/{name}")


FLUX_DEV = _file("diffusion_models", "Comfy-Org/flux1-dev:flux1-dev.safetensors")
FLUX_CONTROL = _file("controlnet", "XLabs-AI/flux-controlnet-canny-v3:flux-canny-controlnet-v3.safetensors")
FLUX_FILL = _file("diffusion_models", "Comfy-Org/flux1-dev:split_files/diffusion_models/flux1-fill-dev.safetensors")
KONTEXT = _file(
    "diffusion_models",
    "Comfy-Org/flux1-kontext-dev_ComfyUI:split_files/diffusion_models/flux1-dev-kontext_fp8_scaled.safetensors",
)
FLUX_LORA = _file("loras", "Comfy-Org/flux1-dev:split_files/loras/flux1-depth-dev-lora.safetensors")
CLIP_L = _file("text_encoders", f"{FLUX_TEXT}:clip_l.safetensors")
T5 = _file("text_encoders", f"{FLUX_TEXT}:t5xxl_fp16.safetensors")
AE = _file("vae", "Comfy-Org/HiDream-I1_ComfyUI:split_files/vae/ae.safetensors")
FLUX_2 = _file("diffusion_models", "Comfy-Org/flux2-dev:split_files/diffusion_models/flux2_dev_fp8mixed.safetensors")
MISTRAL = _file("text_encoders", "Comfy-Org/flux2-dev:split_files/text_encoders/mistral_3_small_flux2_bf16.safetensors")
FLUX_2_VAE = _file("vae", "Comfy-Org/Lens:vae/flux2-vae.safetensors")
QWEN_IMAGE = _below(QWEN, "diffusion_models", "qwen_image_fp8_e4m3fn.safetensors")
QWEN_EDIT = _file(
    "diffusion_models",
    "Comfy-Org/Qwen-Image-Edit_ComfyUI:split_files/diffusion_models/qwen_image_edit_2509_fp8_e4m3fn.safetensors",
)
QWEN_TEXT = _below(QWEN, "text_encoders", "qwen_2.5_vl_7b_fp8_scaled.safetensors")
QWEN_VAE = _below(QWEN, "vae", "qwen_image_vae.safetensors")
QWEN_LORA = _file("loras", "lightx2v/Qwen-Image-Lightning:Qwen-Image-Lightning-8steps-V1.0.safetensors")
QWEN_CONTROL = _file(
    "controlnet",
    "Comfy-Org/Qwen-Image-InstantX-ControlNets:split_files/controlnet/Qwen-Image-InstantX-ControlNet-Union.safetensors",
)
WAN_T2V = _below(WAN_21, "diffusion_models", "wan2.1_t2v_1.3B_fp16.safetensors")
WAN_I2V = _below(WAN_21, "diffusion_models", "wan2.1_i2v_480p_14B_fp16.safetensors")
WAN_VACE = _below(WAN_21, "diffusion_models", "wan2.1_vace_14B_fp16.safetensors")
WAN_HIGH = _below(WAN_22, "diffusion_models", "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors")
WAN_LOW = _below(WAN_22, "diffusion_models", "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors")
UMT5 = _below(WAN_21, "text_encoders", "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
WAN_VAE = _below(WAN_21, "vae", "wan_2.1_vae.safetensors")
CLIP_VISION = _below(WAN_21, "clip_vision", "clip_vision_h.safetensors")
HUNYUAN_T2V = _below(HUNYUAN, "diffusion_models", "hunyuanvideo1.5_720p_t2v_fp16.safetensors")
HUNYUAN_TEXT = _below(HUNYUAN, "text_encoders", "byt5_small_glyphxl_fp16.safetensors")
HUNYUAN_VAE = _below(HUNYUAN, "vae", "hunyuanvideo15_vae_fp16.safetensors")
Z_IMAGE = _file(
    "diffusion_models", "Comfy-Org/z_image_turbo:split_files/diffusion_models/z_image_turbo_bf16.safetensors"
)
QWEN_3 = _file("text_encoders", "Comfy-Org/z_image_turbo:split_files/text_encoders/qwen_3_4b.safetensors")
LTX_2 = _file("checkpoints", "Lightricks/LTX-2:ltx-2-19b-dev.safetensors")
GEMMA = _file("text_encoders", "Comfy-Org/ltx-2:split_files/text_encoders/gemma_3_12B_it.safetensors")
SDXL = _file("checkpoints", "stabilityai/stable-diffusion-xl-base-1.0:sd_xl_base_1.0.safetensors")
SDXL_CONTROL = _file("controlnet", "xinsir/controlnet-union-sdxl-1.0:diffusion_pytorch_model_promax.safetensors")
MINIMAX_H3 = _file("diffusion_models", f"{MINIMAX}diffusion_models/minimax_h3_fl2va_pruned_int8_convrot.safetensors")
QWEN_3_VL = _file("text_encoders", f"{MINIMAX}text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors")
MINIMAX_VAE = _file("vae", f"{MINIMAX}vae/minimax_h3_video_vae_fp16.safetensors")
MINIMAX_AUDIO_VAE = _file("vae", f"{MINIMAX}vae/minimax_h3_audio_vae_fp32.safetensors")
