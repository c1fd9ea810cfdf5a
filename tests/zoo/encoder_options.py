"""The options with which ComfyUI's loaders make tiny text encoders, by the names that ComfyUI has for them."""

from __future__ import annotations

from typing import Any

CLIP = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
T5 = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 3}
# By 512 values for its keys ComfyUI knows Qwen2.5-VL 7B.
QWEN = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
# By 2560 values ComfyUI knows Qwen3 4B; prompts of tests have its first tokens alone.
QWEN3 = {"vocab_size": 600, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
OPTIONS: dict[str, Any] = {
    "model_config": CLIP,  # of CLIP-L and CLIP-G, whose number of layers tells them apart
    "t5base_model_config": T5,
    "t5xxl_model_config": T5,
    "qwen25_7b_model_config": {**QWEN, "num_key_value_heads": 4},
    "qwen3_4b_model_config": {**QWEN3, "num_key_value_heads": 1},
}
