"""What is tried of each family on several ranks."""

from __future__ import annotations

MASKED = ("qwen_image", "hunyuan_video", "ltxv")  # families that honour a mask of the text
KEPT = ("wan_5b", "ltxv")  # families in which frames may have timesteps of their own


def cases(name: str) -> list[str]:
    return ["odd", "batch", "skipping", *(["masked"] if name in MASKED else []), *(["kept"] if name in KEPT else [])]
