"""What patches inside of blocks go by, for the part of the tokens that a rank holds.

Such patches see each token or each frame by itself: see parallel_runtime/inside_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from ...errors import Refused
from ...inside_blocks import goes_by_frames
from ...plan import Along, Names, Site, Slices
from .cuts import Cuts
from .frames import Part


def of_own_tokens(options: dict[str, Any], site: Site, cuts: Cuts) -> dict[str, Any]:
    """transformer_options in which positions in whole streams (`img_slice`), and what a model patch keeps for each
    token (`model_patch_data`), are of what this rank holds."""
    own, over = dict(options), site.attends
    places = options.get("img_slice")
    if places and isinstance(over, tuple) and places[1] == cuts.total(over):
        own["img_slice"] = list(cuts.cut([tuple(places)], Slices(over), "img_slice")[0])
    if not site.carries:
        return own
    (_, _, streams), *_ = site.carries
    own["patches"] = {
        kind: [partial(_of_frames, patch, cuts, streams) if goes_by_frames(patch) else patch for patch in found]
        for kind, found in options["patches"].items()
    }
    if data := options.get("model_patch_data"):
        own["model_patch_data"] = {
            patch: cuts.cut(value, Along(streams), f"model_patch_data of patch {number}")
            for number, (patch, value) in enumerate(data.items())
        }
    return own


def _of_frames(patch: Callable[[dict[str, Any]], Tensor], cuts: Cuts, streams: Names, given: dict[str, Any]) -> Tensor:
    """A patch of InfiniteTalk's on the frames that a rank has tokens of, each with its own sound."""
    options, total = given["transformer_options"], cuts.total(streams)
    frames, *plane = options["grid_sizes"]
    if total != prod(options["grid_sizes"]):
        raise Refused("InfiniteTalk with tokens that are of no frame cannot be cut by sequence; set ring and Ulysses "
                      "degrees to 1")  # fmt: skip
    part = Part.of(cuts.first(streams[0]), cuts.held(streams), total, frames)
    sound = options["audio_embeds"][:, part.first : part.last]
    own = {**options, "grid_sizes": (part.last - part.first, *plane), "audio_embeds": sound}
    return part.drop(patch({**given, "x": part.fill(given["x"]), "transformer_options": own}))
