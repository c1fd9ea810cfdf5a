"""What nodes/code.py describes, made again from this rank's ComfyUI: the same code around the values that came.

Names outside ComfyUI's own packages are refused (comfyui.named); nothing is evaluated.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, NoReturn

import comfy.model_management
import torch

from ...errors import Refused
from .comfyui import module_named, named

LOCAL = ".<locals>."


PatchModel = Callable[[dict[str, Any]], Any]


def rebuild(described: Any, patch_model: PatchModel | None = None) -> Any:
    """`patch_model` makes the models that patches bring along; a description without such needs none."""
    return _Rebuilder(patch_model).rebuild(described)


class _Rebuilder:
    """Remembers the numbered objects of one description."""

    def __init__(self, patch_model: PatchModel | None) -> None:
        self._made: dict[int, Any] = {}
        self._patch_model = patch_model

    def rebuild(self, described: Any) -> Any:
        if isinstance(described, list | tuple):
            return type(described)([self.rebuild(part) for part in described])
        if not isinstance(described, dict):
            return described
        make = getattr(self, f"_{described['kind']}", None)
        if make is None:
            raise ValueError(f"no such description: {described['kind']!r}")
        return make(described)

    def _dict(self, described: dict[str, Any]) -> dict[Any, Any]:
        return {self.rebuild(key): self.rebuild(value) for key, value in described["items"]}

    def _set(self, described: dict[str, Any]) -> set[Any]:
        return {self.rebuild(item) for item in described["items"]}

    def _uuid(self, described: dict[str, Any]) -> uuid.UUID:
        return uuid.UUID(described["text"])

    def _dtype(self, described: dict[str, Any]) -> torch.dtype:
        return getattr(torch, described["name"])

    def _enum(self, described: dict[str, Any]) -> Any:
        return named(described["class"])[described["name"]]

    def _on_device(self, described: dict[str, Any]) -> torch.Tensor:
        made: torch.Tensor = described["of"].to(comfy.model_management.get_torch_device())
        return made

    def _name(self, described: dict[str, Any]) -> Any:
        return named(described["name"])

    def _method(self, described: dict[str, Any]) -> Any:
        return getattr(self.rebuild(described["of"]), described["name"])

    def _model_patch(self, described: dict[str, Any]) -> Any:
        if self._patch_model is None:
            raise Refused(f"the model patch {described['path']} is where the workers have no place for it; remove it")
        return self._patch_model(described)

    def _encoded(self, described: dict[str, Any]) -> Encoded:
        return Encoded(described)

    def _same(self, described: dict[str, Any]) -> Any:
        return self._made[described["number"]]

    def _function(self, described: dict[str, Any]) -> FunctionType:
        """A function that ComfyUI's code makes inside another one."""
        module, _, path = described["name"].partition(":")
        outermost, *inner = path.split(LOCAL)
        code = named(f"{module}:{outermost}").__code__
        for name in inner:
            code = next(code for code in _codes(code) if code.co_name == name and _holds(code, described["line"]))
        function = FunctionType(
            code,
            vars(module_named(module)),
            argdefs=self.rebuild(described["defaults"]),
            closure=tuple(self.rebuild(described["cells"])),
        )
        function.__qualname__ = path
        function.__kwdefaults__ = self.rebuild(described["keyword_defaults"])
        vars(function).update(self.rebuild(described["attributes"]))
        return function

    def _cell(self, described: dict[str, Any]) -> CellType:
        made = self._made[described["number"]] = CellType(self.rebuild(described["of"]))
        return made

    def _object(self, described: dict[str, Any]) -> Any:
        kind = named(described["class"])
        made = kind.__new__(kind)
        vars(made).update(self.rebuild(described["attributes"]))
        self._made[described["number"]] = made
        return made


def _codes(code: CodeType) -> Iterator[CodeType]:
    return (part for part in code.co_consts if isinstance(part, CodeType))


def _holds(code: CodeType, line: int) -> bool:
    """Does a function begin on this line of `code`, or inside it?"""
    return code.co_firstlineno == line or any(_holds(part, line) for part in _codes(code))


class Encoded:
    """What stands on a model patch where its VAE was: its pictures are encoded. The other side is nodes/encoded.py."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._compression: int = described["compression"]

    def spacial_compression_encode(self) -> int:
        return self._compression

    def temporal_compression_decode(self) -> int:
        return 1

    def encode(self, pixels: torch.Tensor) -> NoReturn:
        """Raises Refused: pixels [B, H, W, C] are of another size than the whole latent."""
        height, width = pixels.shape[1:3]
        raise Refused(
            f"a model patch asks for its picture at {width} x {height} pixels, which is not the size of the whole "
            "latent; take away the area of the prompt, or the patch"
        )
