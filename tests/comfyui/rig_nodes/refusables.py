"""Real ComfyUI objects of a pack that workers cannot have: around the network, beside it, and inside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any
from unittest.mock import patch

import comfy.controlnet
import comfy.model_management
import comfy.ops
import torch
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.modules.attention import attention_split
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, add_wrapper
from comfy_api.latest import io

CATEGORY = "cp test"
WIDTH = 256  # of the tiny FLUX


class AttentionPatch(io.ComfyNode):
    """MODEL with an attn1 patch, as IP-Adapter and its like leave it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestAttentionPatch",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher) -> io.NodeOutput:
        patched = model.clone()
        patched.set_model_attn1_patch(_leave_alone)
        return io.NodeOutput(patched)


class Control(io.ComfyNode):
    """CONDITIONING with a control net in it, as Apply ControlNet leaves it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestControl",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Conditioning.Input("conditioning")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: list[list[Any]]) -> io.NodeOutput:
        control = Residuals()
        added = {"control": control, "control_apply_to_uncond": True}
        return io.NodeOutput([[text, {**options, **added}] for text, options in conditioning])


class RealControl(io.ComfyNode):
    """CONDITIONING with ComfyUI's own ControlNet of FLUX (XLabs' kind, which takes pixels) in it, of random weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestRealControl",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Conditioning.Input("conditioning"), io.Model.Input("model")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: list[list[Any]], model: ModelPatcher) -> io.NodeOutput:
        dice = torch.Generator().manual_seed(9)
        config = {key: value for key, value in model.model.model_config.unet_config.items() if key != "dtype"}
        network = ControlNetFlux(**config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
        for weight in network.parameters():
            weight.data = torch.randn(weight.shape, generator=dice) * 0.1
        control = comfy.controlnet.ControlNet(
            network, load_device=comfy.model_management.get_torch_device(), extra_conds=["y", "guidance"]
        ).set_cond_hint(torch.rand(1, 3, 128, 192, generator=dice), 0.7, (0.0, 0.8))
        added = {"control": control, "control_apply_to_uncond": True}
        return io.NodeOutput([[text, {**options, **added}] for text, options in conditioning])


class Residuals(comfy.controlnet.ControlBase):
    """A ControlNet without a network: what it gives FLUX depends on the latent, and on nothing else."""

    def get_control(self, x_noisy: torch.Tensor, t: torch.Tensor, *_: Any) -> dict[str, list[torch.Tensor | None]]:
        tokens = -(-x_noisy.shape[2] // 2) * -(-x_noisy.shape[3] // 2)
        dice = torch.Generator().manual_seed(tokens)
        each = [torch.randn(1, tokens, WIDTH, generator=dice).repeat(x_noisy.shape[0], 1, 1) for _ in range(2)]
        return {"input": [each[0]], "output": [each[1]]}

    def pre_run(self, *_: Any) -> None:
        """It has no noise levels of its own."""

    def copy(self) -> Residuals:
        return self


UNNAMED = {"no_file": lambda model: model, "copied": copy.copy}  # a copy is made by no loader


class ForeignWrapper(io.ComfyNode):
    """MODEL as a custom node pack leaves it, by `kind`: most are the kind of a wrapper around its sampling, and
    "options: " with a kind is one in its model options that halves what it wraps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestForeignWrapper",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Model.Input("model"), io.String.Input("kind")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, kind: str) -> io.NodeOutput:
        patched = model.clone()
        if kind == "post_cfg":
            patched.set_model_sampler_post_cfg_function(_denoised)
        elif kind == "model_function":
            patched.set_model_unet_function_wrapper(_evaluated)
        elif kind == "transformer_option":
            patched.model_options["transformer_options"]["cp_test_attention"] = False
        elif kind == "state":
            patched.model_options["transformer_options"]["cp_test_state"] = state = Residuals()
            patched.add_wrapper("apply_model", partial(_noting, state))
        elif kind == "unheard_of_patch":  # ComfyUI's own function, in a place that no plan has heard of
            patched.set_model_patch(comfy.model_management.get_torch_device_name, kind)
        elif kind == "no_guidance":  # a plain value in place of the network's own
            patched.add_object_patch("diffusion_model.params.guidance_embed", False)
        elif kind in UNNAMED:
            patched.cached_patcher_init, patched.model = None, UNNAMED[kind](patched.model)
        elif kind == "masks of channels":
            add_wrapper("outer_sample", _other_masks, patched.model_options, is_model_options=True)
        elif kind.startswith("options: "):
            add_wrapper(kind.removeprefix("options: "), halved, patched.model_options, is_model_options=True)
        else:
            patched.add_wrapper(kind, _go_on)
        return io.NodeOutput(patched)


class Tampered(io.ComfyNode):
    """MODEL whose network a pack has changed in place, by `kind`: for good, or while its wrapper runs (as TeaCache)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestTampered",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Model.Input("model"), io.String.Input("kind")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, kind: str) -> io.NodeOutput:
        patched, network = model.clone(), model.model.diffusion_model
        if kind == "method":
            network.forward_orig = MethodType(_negated, network)
        elif kind == "block":
            network.double_blocks[0].forward = MethodType(_negated, network.double_blocks[0])
        elif kind == "own attention":
            network.double_blocks[1].comfy_attention = ComfyAttention()
        elif kind == "hook":
            network.double_blocks[0].register_forward_hook(lambda module, args, out: (-out[0], out[1]))
        elif kind in DURING:
            patched.set_model_unet_function_wrapper(DURING[kind])
        elif kind == "torch's attention in the forward":
            patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "cp_test", _with_other_attention)
        elif kind in IN_PLACE:
            IN_PLACE[kind](patched.model)
        else:
            patched.set_model_unet_function_wrapper(partial(_tampering, network if kind == "meanwhile" else None))
        return io.NodeOutput(patched)


def _set(owners: Iterable[Any], name: str, value: Any) -> None:
    for owner in owners:
        setattr(owner, name, value)


def _scale(weights: Iterable[torch.Tensor]) -> None:
    for weight in weights:
        weight.data.mul_(1.5)


def _of(model: Any, kind: type) -> list[Any]:
    return [module for module in model.diffusion_model.modules() if isinstance(module, kind)]


IN_PLACE: dict[str, Callable[[Any], Any]] = {  # of ComfyUI's model around the network
    "circular": lambda model: _set(_of(model, torch.nn.Conv2d), "padding_mode", "circular"),
    "zeros": lambda model: _set(_of(model, torch.nn.Conv2d), "padding_mode", "zeros"),
    "eps": lambda model: _set(_of(model, torch.nn.GroupNorm), "eps", 0.5),
    "theta": lambda model: setattr(model.diffusion_model.pe_embedder, "theta", 500),
    "axes": lambda model: setattr(model.diffusion_model.pe_embedder, "axes_dim", [56, 56, 16]),
    "latent format": lambda model: setattr(model.latent_format, "scale_factor", 0.5),
    "weights": lambda model: _scale(model.diffusion_model.single_blocks[1].parameters()),
    "one weight": lambda model: _scale([model.diffusion_model.single_blocks[1].linear2.bias]),
    "columns": lambda model: _scale([model.diffusion_model.single_blocks[1].linear1.weight[:, 5:8]]),
    "a list": lambda model: [
        setattr(conv, "_reversed_padding_repeated_twice", [*conv._reversed_padding_repeated_twice])
        for conv in _of(model, torch.nn.Conv2d)
    ],
    "deleted": lambda model: model.diffusion_model.double_blocks.__delitem__(0),
    "added": lambda model: model.diffusion_model.single_blocks.append(torch.nn.Identity()),
    "replaced": lambda model: setattr(model.diffusion_model.double_blocks[0], "img_mlp", torch.nn.Identity()),
}


class ComfyAttention(torch.nn.Module):
    """As newer versions of ComfyUI have it in a network whose file chooses an attention."""

    __module__ = comfy.ops.disable_weight_init.__module__

    function = staticmethod(attention_split)  # this version of ComfyUI does not call it


def _negated(network: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("somebody called it")


def _tampering(network: Any, evaluate: Any, args: dict[str, Any]) -> torch.Tensor:
    network = evaluate.__self__.diffusion_model if network is None else network
    with patch.multiple(network, forward_orig=MethodType(_negated, network)):
        return evaluate(args["input"], args["timestep"], **args["c"])


def _with_other_torch(owner: Any, name: str, evaluate: Any, args: dict[str, Any]) -> torch.Tensor:
    """As AnimateDiff-Evolved replaces torch's GroupNorm for the time of a run."""
    with _halving(owner, name):
        return _evaluated(evaluate, args)


def _with_other_attention(executor: Any, *args: Any, **kwargs: Any) -> Any:
    with _halving(torch.nn.functional, "scaled_dot_product_attention"):
        return executor(*args, **kwargs)


def _halving(owner: Any, name: str) -> Any:
    """Replaces a function of torch's, in this context, with one that returns half of it."""
    original = getattr(owner, name)

    def halved(*given: Any, **named: Any) -> Any:
        return original(*given, **named) / 2

    return patch.object(owner, name, halved)


def _with_other_torch_at_first(evaluate: Any, args: dict[str, Any]) -> torch.Tensor:
    if float(args["timestep"][0]) > 0.5:
        return _with_other_torch(torch.nn.SiLU, "forward", evaluate, args)
    return _evaluated(evaluate, args)


def _evaluated(evaluate: Any, args: dict[str, Any]) -> torch.Tensor:
    return evaluate(args["input"], args["timestep"], **args["c"])


def _denoised(args: dict[str, Any]) -> torch.Tensor:
    return args["denoised"]


def _noting(state: Any, executor: Any, *args: Any, **kwargs: Any) -> Any:
    state.seen = args
    return executor(*args, **kwargs)


def _go_on(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs)


def halved(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """A wrapper of anything that gives a latent, or one for each prompt."""
    out = executor(*args, **kwargs)
    return [part * 0.5 for part in out] if isinstance(out, list) else out * 0.5


def _other_masks(
    executor: Any, noise: Any, latent: Any, sampler: Any, sigmas: Any, mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Every channel has a mask of its own."""
    return executor(
        noise, latent, sampler, sigmas, mask * torch.linspace(0.5, 1, mask.shape[1])[:, None, None], *args, **kwargs
    )


def _leave_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
    return {"q": q, "k": k, "v": v}


DURING: dict[str, Callable[..., torch.Tensor]] = {  # what replaces code of torch's while an evaluation runs
    "torch's method": partial(_with_other_torch, torch.nn.SiLU, "forward"),
    "torch's method at first": _with_other_torch_at_first,
    "torch's normalization": partial(_with_other_torch, torch.nn.GroupNorm, "forward"),
    "torch's attention": partial(_with_other_torch, torch.nn.functional, "scaled_dot_product_attention"),
}
