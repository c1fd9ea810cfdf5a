"""Every workflow that is made here. The demo is not: its own picture is taken of a run (tests/browser/picture.py)."""

from __future__ import annotations

from .edits import control, control_flux, control_sdxl, inpaint, kontext, qwen_edit
from .graph import Template
from .pictures import custom, flux_2, flux_dev, lora, machines, native, pipeline, qwen_image, sdxl, z_image
from .videos import hunyuan, ltx_2, minimax_h3_i2v, minimax_h3_t2v, vace, wan_22, wan_i2v, wan_t2v

MAKERS = (
    flux_dev, kontext, flux_2, qwen_image, qwen_edit, z_image, sdxl, lora, inpaint, control, custom, native, machines,
    pipeline, wan_t2v, wan_22, wan_i2v, vace, hunyuan, ltx_2, control_sdxl, control_flux, minimax_h3_t2v,
    minimax_h3_i2v,
)  # fmt: skip


def templates() -> list[Template]:
    """In the order of ComfyUI's list, after the demo."""
    made = [make() for make in MAKERS]
    for number, template in enumerate(made, start=2):
        template.number = number
    return made
