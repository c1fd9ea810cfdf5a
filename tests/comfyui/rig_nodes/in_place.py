"""Code of a pack that a node puts onto a network for good, beside what it puts onto a MODEL alone."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

FACTOR = 1.0


def _scaled(out: Any, factor: float) -> Any:
    return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor


def _less(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _scaled(type(self).forward(self, *args, **kwargs), 0.9 * FACTOR)


def _by(block: torch.nn.Module, factor: float, *args: Any, **kwargs: Any) -> Any:
    return _scaled(type(block).forward(block, *args, **kwargs), factor)


def _by_its_own(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Reads attributes that a node has added."""
    out = _scaled(type(self).forward(self, *args, **kwargs), self.cp_factor)
    return _scaled(out, 1 + 0.01 * float(self.cp_layer(torch.ones(4)).mean()))


class Activation:
    """An object in place of a function."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x) * self.factor


def _blocks(network: Any) -> list[Any]:
    for name in ("double_blocks", "blocks"):
        if hasattr(network, name):
            return list(getattr(network, name))
    return [row[0] for row in list(network.input_blocks)[1:3]]


def _method(network: Any, block: Any) -> None:
    block.forward = types.MethodType(_less, block)


def _partial(network: Any, block: Any) -> None:
    block.forward = functools.partial(_by, block, 0.9)


def _closure(network: Any, block: Any) -> None:
    original, options = block.forward, {"factor": 0.9}

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _scaled(original(*args, **kwargs), options["factor"])

    block.forward = forward


def _all_blocks(network: Any, block: Any) -> None:
    for one in _blocks(network):
        one.forward = types.MethodType(_less, one)


def _attributes(network: Any, block: Any) -> None:
    block.cp_factor, block.cp_layer = 0.9, torch.nn.Linear(4, 4)
    torch.nn.init.constant_(block.cp_layer.weight, 0.5)
    block.forward = types.MethodType(_by_its_own, block)


def _class(network: Any, block: Any) -> None:
    block.__class__ = _class_of(type(block))


def _other_attribute(network: Any, block: Any) -> None:
    """A function that is no method of the class."""
    layer = next(one for one in network.modules() if isinstance(one, torch.nn.SiLU))
    layer.inplace = False
    layer.cp_unused = Activation(0.5)
    layer.forward = Activation(0.9)


def _borrowed(network: Any, block: Any) -> None:
    """A method of ComfyUI's own, of another block."""
    block.forward = [one for one in network.modules() if type(one) is type(block)][-1].forward


def _made_class(network: Any, block: Any) -> None:
    """A class that no module has under its name."""
    kind = type(block)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _scaled(kind.forward(self, *args, **kwargs), 0.9)

    block.__class__ = type(f"{kind.__name__}Made", (kind,), {"forward": forward})


def _unsendable(network: Any, block: Any) -> None:
    lock, original = threading.Lock(), block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return _scaled(original(*args, **kwargs), 0.9)

    block.forward = forward


IN_PLACE: dict[str, Callable[[Any, Any], None]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _method,
        _partial,
        _closure,
        _all_blocks,
        _attributes,
        _class,
        _other_attribute,
        _borrowed,
        _made_class,
        _unsendable,
    )
}


class Less:
    """What a pack's class does otherwise."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _scaled(super().forward(*args, **kwargs), 0.9)


def _class_of(kind: type) -> type:
    return next(one for one in KINDS if one.__mro__[2] is kind)


def _kinds() -> list[type]:
    from comfy.ldm.flux.layers import DoubleStreamBlock
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock
    from comfy.ldm.wan.model import WanAttentionBlock

    made = []
    for kind in (DoubleStreamBlock, ResBlock, WanAttentionBlock):
        name = f"Pack{kind.__name__}"
        made.append(type(name, (Less, kind), {"__module__": __name__, "__qualname__": name}))
    globals().update({one.__name__: one for one in made})
    return made


KINDS = _kinds()


class InPlace(io.ComfyNode):
    """MODEL whose network has changed for good; or, "object patch: " with a kind, for this MODEL alone."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestInPlace",
            category="cp test",
            is_dev_only=True,
            inputs=[io.Model.Input("model"), io.String.Input("kind")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, kind: str) -> io.NodeOutput:
        patched, network = model.clone(), model.model.diffusion_model
        block = _blocks(network)[0]
        path = next(name for name, module in network.named_modules() if module is block)
        if kind == "object patch: class":
            patched.add_object_patch(f"diffusion_model.{path}.__class__", _class_of(type(block)))
        elif kind == "object patch: function":
            patched.add_object_patch(f"diffusion_model.{path}.forward", functools.partial(_by, block, 0.9))
        elif kind != "nothing":
            IN_PLACE[kind](network, block)
        return io.NodeOutput(patched)


NODES = [InPlace]
