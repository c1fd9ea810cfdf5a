"""What is tried of each family on several ranks. Those whose attention cannot be made parallel have no cases."""

from __future__ import annotations

MASKED = ("qwen_image", "hunyuan_video", "ltxv")  # families that honour a mask of the text
KEPT = ("wan_5b", "ltxv")  # families in which frames may have timesteps of their own
NOT_PARALLEL = ("sd35_large", "sd35_medium", "lumina2")


def cases(name: str) -> list[str]:
    if name in NOT_PARALLEL:
        return []
    return ["odd", "batch", *(["masked"] if name in MASKED else []), *(["kept"] if name in KEPT else [])]
