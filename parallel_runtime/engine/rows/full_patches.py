"""ComfyUI's patches inside a UNet that is split by rows: each sees full tensors and full shapes, and its output is
split. The attention between two patches of a block is computed in full on every rank.

Knows the kinds of patches by ComfyUI's names, and no single patch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from ...architectures.block_patches import sees_each_token
from .levels import Levels, NoLevel

Options = dict[str, Any]
Patch = Callable[..., Any]
PICTURES = ("input_block_patch", "input_block_patch_after_skip", "output_block_patch")
SELF, CROSS = "attn1", "attn2"


class FullPatches:
    """Patches run in the context `undivided`. `has_full_tokens`: the current attention has all tokens, for a patch."""

    def __init__(self, undivided: Callable[[], AbstractContextManager[None]]) -> None:
        self.has_full_tokens = False
        self.over_time = False  # a block attends along time, each pixel for itself
        self._undivided = undivided
        self._levels: Levels
        self._shape: list[int] = []

    def of(self, options: Options, levels: Levels, shape: list[int]) -> Options:
        """Returns the patches of transformer_options, for a forward of these levels of a latent [B, C, H, W]."""
        self._levels, self._shape = levels, shape
        self.has_full_tokens = self.over_time = False
        by_kind: dict[str, list[Any]] = options.get("patches") or {}
        of_pictures: dict[str, Patch] = {kind: self._picture for kind in PICTURES}
        of_pictures |= {"middle_block_after_patch": self._middle, "middle_patch": self._between}
        patches = {
            kind: [
                partial(of_pictures[kind], patch) if kind in of_pictures and not sees_each_token(patch) else patch
                for patch in of_kind
            ]
            for kind, of_kind in by_kind.items()
        }
        if layers := by_kind.get("forward_timestep_embed_patch"):
            patches["forward_timestep_embed_patch"] = [(kind, partial(self._layer, patch)) for kind, patch in layers]
        for kind in (SELF, CROSS):
            first, last = by_kind.get(f"{kind}_patch", []), by_kind.get(f"{kind}_output_patch", [])
            if not all(map(sees_each_token, [*first, *last])):
                patches[f"{kind}_patch"] = [partial(self._gather, kind), *(partial(self._call, p) for p in first)]
                patches[f"{kind}_output_patch"] = [*(partial(self._call, p) for p in last), self._split]
        replaced = {kind: dict(by_block) for kind, by_block in (options.get("patches_replace") or {}).items()}
        for kind in replaced.keys() & {SELF, CROSS}:
            replaced[kind] = {at: partial(self._attention, kind, patch) for at, patch in replaced[kind].items()}
        return {"patches": patches, "patches_replace": replaced}

    def _full_options(self, options: Options) -> Options:
        full = {**options, "original_shape": self._shape}
        if "activations_shape" in options:
            full["activations_shape"] = self._levels.full_shape(options["activations_shape"])
        return full

    def _call(self, patch: Patch, *arguments: Any, **more: Any) -> Any:
        """Calls a patch with full tensors, and the options last."""
        *tensors, options = arguments
        with self._undivided():
            return patch(*tensors, self._full_options(options), **more)

    def _picture(self, patch: Patch, *arguments: Any) -> Any:
        """Calls a patch of an input or output block, which takes pictures and the options."""
        *pictures, options = arguments
        full = [self._levels.gather(x) for x in pictures]
        output = self._call(patch, *full, options)
        if not isinstance(output, tuple):
            return self._split_picture(output, full[0])
        return tuple(None if x is None else self._split_picture(x, of) for x, of in zip(output, full, strict=True))

    def _split_picture(self, output: Tensor, before: Tensor) -> Tensor:
        """Returns this rank's rows. Raises NoLevel for a picture of another size than before (Deep Shrink)."""
        if output.shape[-2:] != before.shape[-2:]:
            raise self._no_level("a picture", output.shape)
        return self._levels.split(output)

    def _middle(self, patch: Patch, arguments: Options) -> Options:
        full = {name: self._levels.gather(arguments[name]) for name in ("h", "x")}
        options = {"transformer_options": self._full_options(arguments["transformer_options"])}
        with self._undivided():
            output = patch({**arguments, **full, **options})
        return {**output, "h": self._levels.split(output["h"])}

    def _layer(self, patch: Patch, layer: Any, x: Tensor, emb: Any, context: Any, *arguments: Any) -> Tensor:
        options, shape, *more = arguments
        full = self._levels.gather(x)
        if shape is not None:
            shape = self._levels.full_shape(list(shape))
        with self._undivided():
            output = patch(layer, full, emb, context, self._full_options(options), shape, *more)
        return self._levels.split(output)

    def _between(self, patch: Patch, x: Tensor, extra: Options) -> Tensor:
        """Calls a middle_patch, which takes tokens between the two attentions of a block."""
        level = self._level(extra)
        output = self._call(patch, self._levels.gather_tokens(x, level), extra)
        return self._levels.split_tokens(output, level)

    def _gather(self, kind: str, n: Tensor, key: Any, value: Any, extra: Options) -> tuple[Any, Any, Any]:
        """Acts as the first patch of an attention: from here to `_split` its tokens are full."""
        full = self._levels.gather_tokens(n, self._level(extra))
        self.has_full_tokens = True
        return (full, full, full) if kind == SELF and key is n else (full, key, value)

    def _split(self, n: Tensor, extra: Options) -> Tensor:
        self.has_full_tokens = False
        return self._levels.split_tokens(n, self._level(extra))

    def _attention(self, kind: str, patch: Patch, q: Tensor, k: Tensor, v: Tensor, extra: Options, **more: Any) -> Any:
        """Replaces an attention, or runs within one that has full tokens by then."""
        if self.has_full_tokens:
            return self._call(patch, q, k, v, extra, **more)
        level = self._level(extra)
        q, *keys = (self._levels.gather_tokens(x, level) for x in ((q, k, v) if kind == SELF else (q,)))
        k, v = keys or (k, v)
        return self._levels.split_tokens(self._call(patch, q, k, v, extra, **more), level)

    def _level(self, extra: Options) -> int:
        """Returns the level of a block's tokens. Raises NoLevel for a block that attends along time."""
        shape = extra["activations_shape"]
        if self.over_time:
            raise self._no_level("attention along time", shape)
        return self._levels.level(shape, "a patch")

    def _no_level(self, name: str, shape: Sequence[int]) -> NoLevel:
        rows, columns = self._shape[-2:]
        return NoLevel(f"{name} of {tuple(shape)} belongs to no level of {rows} x {columns}")
