"""Rebuilds the objects that nodes/describe/comfy_objects.py describes: this rank's ComfyUI code with the sent values.

Names outside ComfyUI's own packages are refused (comfyui.named); nothing is evaluated.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import CellType, CodeType, FunctionType
from typing import Any, NoReturn

import torch
from comfy.model_management import get_torch_device

from ...errors import Refused
from ...loading.fingerprint import code_fingerprint
from .comfyui import module_named, named

LOCAL = ".<locals>."

LoadAdditional = Callable[[dict[str, Any]], Any]  # loads what a description of nodes/describe names
VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {  # by kind: values that have no parts to rebuild
    "name": lambda described: named(described["name"]),
    "enum": lambda described: named(described["class"])[described["name"]],
    "uuid": lambda described: uuid.UUID(described["text"]),
    "dtype": lambda described: getattr(torch, described["name"]),
    "device": lambda described: torch.device("cpu") if described["on_cpu"] else get_torch_device(),
    "on_device": lambda described: described["of"].to(get_torch_device()),
    "encoded": lambda described: Encoded(described),
}


def rebuild(described: Any, load_additional: LoadAdditional | None = None) -> Any:
    """Rebuilds one described value. `load_additional` loads its model patches, ControlNets and the like, if any."""
    return Rebuilder(load_additional).rebuild(described)


class Rebuilder:
    """Rebuilds what one Describer described, in the same order, and remembers the numbered objects."""

    def __init__(self, load_additional: LoadAdditional | None = None) -> None:
        self._made: dict[int, Any] = {}
        self._load_additional = load_additional

    def rebuild(self, described: Any) -> Any:
        if isinstance(described, list | tuple):
            return type(described)([self.rebuild(part) for part in described])
        if not isinstance(described, dict):
            return described
        kind = described["kind"]
        made = VALUES[kind](described) if kind in VALUES else getattr(self, f"_{kind}")(described)
        if "number" in described:
            self._made[described["number"]] = made
        return made

    def _dict(self, described: dict[str, Any]) -> dict[Any, Any]:
        return {self.rebuild(key): self.rebuild(value) for key, value in described["items"]}

    def _set(self, described: dict[str, Any]) -> set[Any]:
        return {self.rebuild(item) for item in described["items"]}

    def _method(self, described: dict[str, Any]) -> Any:
        return getattr(self.rebuild(described["of"]), described["name"])

    def _same(self, described: dict[str, Any]) -> Any:
        return self._made[described["number"]]

    def _cell(self, described: dict[str, Any]) -> CellType:
        return CellType(self.rebuild(described["of"]))

    def _object(self, described: dict[str, Any]) -> Any:
        kind = named(described["class"])
        made = kind.__new__(kind)
        vars(made).update(self.rebuild(described["attributes"]))
        return made

    def _model_patch(self, described: dict[str, Any]) -> Any:
        if self._load_additional is None:
            raise Refused("patch.place", path=described["path"])
        return self._load_additional(described)

    _gligen = _model_patch

    def _network(self, described: dict[str, Any]) -> Any:
        return self.rebuild(described["of"]).model

    def _hypernetwork(self, described: dict[str, Any]) -> Any:
        loaded = self._model_patch(described)
        return type(loaded)(loaded.hypernet, described["strength"])

    def _control_net(self, described: dict[str, Any]) -> Any:
        """Makes a ControlNet for one run, so that nothing is left of another one's hint."""
        made = self._model_patch(described).copy()
        for name, value in described["settings"].items():
            setattr(made, name, self.rebuild(value))
        if described["hint"] is not None:
            made.cond_hint_original = made.cond_hint = described["hint"].to(get_torch_device())
            made.vae = Encoded(described)
        else:
            made.cond_hint_original = described["image"].movedim(-1, 1)
            made.extra_concat_orig = described["masks"]
        made.previous_controlnet = self.rebuild(described["previous"])
        return made

    def _function(self, described: dict[str, Any]) -> FunctionType:
        """Rebuilds a function that ComfyUI's code defines inside another one. Raises Refused where this rank's ComfyUI
        has another function of that name, as after an update while ComfyUI's process runs."""
        module, _, path = described["name"].partition(":")
        outermost, *inner = path.split(LOCAL)
        codes = [named(f"{module}:{outermost}").__code__]
        for name in inner:
            inside = [part for code in codes for part in code.co_consts if isinstance(part, CodeType)]
            codes = [part for part in inside if part.co_name == name]
        code = next((code for code in codes if code_fingerprint(code) == described["code"]), None)
        if code is None:
            raise Refused("comfyui.changed", name=described["name"])
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


class Encoded:
    """Replaces the VAE of a model patch or ControlNet, whose pictures nodes/describe/model_patches.py and
    control_nets.py have encoded."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._compression: int = described["compression"]

    def spacial_compression_encode(self) -> int:
        return self._compression

    def temporal_compression_decode(self) -> int:
        return 1

    def encode(self, pixels: torch.Tensor) -> NoReturn:
        """Raises Refused: ComfyUI encodes again only pixels [B, H, W, C] of another size than the full latent."""
        height, width = pixels.shape[1:3]
        raise Refused("patch.size", width=width, height=height)
