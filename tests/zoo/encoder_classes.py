"""ComfyUI's classes of text encoders, and configs with which they are tiny. Imports nothing of it."""

from __future__ import annotations

from typing import Any

LLAMA = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
T5 = {"vocab_size": 200, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 5}
CLIP = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {  # the class of ComfyUI, and what is smaller
    "clip_l": ("sd1_clip.SDClipModel", CLIP),
    "clip_g": ("sdxl_clip.SDXLClipG", CLIP),
    "open_clip_h": ("text_encoders.sd2_clip.SD2ClipHModel", CLIP),
    "t5base": ("text_encoders.sa_t5.T5BaseModel", T5),
    "t5xxl": ("text_encoders.sd3_clip.T5XXLModel", T5),
    "umt5xxl": ("text_encoders.wan.UMT5XXlModel", T5),
    "mt5xl": ("text_encoders.hydit.MT5XLModel", T5),
    "byt5": ("text_encoders.hunyuan_image.ByT5SmallModel", T5),
    "pile_t5": ("text_encoders.aura_t5.PT5XlModel", T5),
    "bert": ("text_encoders.hydit.HyditBertModel", {**CLIP, "vocab_size": 200}),
    "llama": ("text_encoders.hunyuan_video.LLAMAModel", LLAMA),
    "mistral": ("text_encoders.flux.Mistral3_24BModel", LLAMA),
    "ministral": ("text_encoders.ernie.Ministral3_3BModel", LLAMA),
    "qwen2.5": ("text_encoders.omnigen2.Qwen25_3BModel", LLAMA),
    "qwen3": ("text_encoders.z_image.Qwen3_4BModel", LLAMA),
    "ovis": ("text_encoders.ovis.Ovis25_2BModel", LLAMA),
    "gemma2": ("text_encoders.lumina2.Gemma2_2BModel", LLAMA),
    "gemma3": ("text_encoders.lumina2.Gemma3_4BModel", LLAMA),
}
