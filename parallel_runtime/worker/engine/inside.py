"""What patches inside of blocks go by, for the part of the tokens that a rank holds.

Such patches see each token by itself: see parallel_runtime/inside_blocks.py.
"""

from __future__ import annotations

from typing import Any

from ...plan import Along, Site, Slices
from .cuts import Cuts


def of_own_tokens(options: dict[str, Any], site: Site, cuts: Cuts) -> dict[str, Any]:
    """transformer_options in which positions in whole streams (`img_slice`), and what a model patch keeps for each
    token (`model_patch_data`), are of what this rank holds."""
    own, over = dict(options), site.attends
    places = options.get("img_slice")
    if places and isinstance(over, tuple) and places[1] == cuts.total(over):
        own["img_slice"] = list(cuts.cut([tuple(places)], Slices(over), "img_slice")[0])
    if (data := options.get("model_patch_data")) and site.carries:
        (_, _, streams), *_ = site.carries
        own["model_patch_data"] = {
            patch: cuts.cut(value, Along(streams), f"model_patch_data of patch {number}")
            for number, (patch, value) in enumerate(data.items())
        }
    return own
