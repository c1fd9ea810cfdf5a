"""Which weights we can read. Everything else is refused in a sentence that names what was found. Knows no model."""

from __future__ import annotations

import re

from ..errors import Refused
from .header import Header

READABLE = frozenset({"BF16", "F16", "F32"})
QUANTISED = {  # what a parameter's name gives away
    "a ComfyUI quantised (comfy_quant)": r"(^|\.)comfy_quant$",
    "a scaled fp8": r"(^|\.)(scaled_fp8|scale_weight|scale_input|weight_scale|input_scale|weight_scale_2)$",
    "a Nunchaku (SVDQuant)": r"\.(wscales|ascales|lora_down|proj_down|smooth_factor|wtscale|wcscales)(\.|$)",
    "a bitsandbytes": r"\.(quant_state\.|absmax$|quant_map$|nested_absmax$)",
    "a GPTQ or AWQ": r"\.(qweight|qzeros|g_idx)$",
    "a torchao": r"\.(tensor_impl|tensor_data_handle|_weight_qdata)",
}
WAY_OUT = "CP samplers read bfloat16, float16 or float32 weights: use that version of the model"


def refuse_quantised(header: Header) -> None:
    """Raises Refused naming the format and one of its tensors, if the weights are not plain floating point.

    Empty tensors are markers, not weights, and any kind will do.
    """
    for kind, pattern in QUANTISED.items():
        for name in header.dtypes:
            if re.search(pattern, name):
                raise Refused(f"this is {kind} checkpoint (it has {name}); {WAY_OUT}")
    for name, dtype in header.dtypes.items():
        if dtype not in READABLE and 0 not in header.shapes[name]:
            raise Refused(f"this checkpoint stores {name} as {dtype}; {WAY_OUT}")
