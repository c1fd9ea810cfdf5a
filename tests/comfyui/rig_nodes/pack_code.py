"""What packs put on a MODEL, and SAMPLERs of theirs, whose code runs in the workers."""

from __future__ import annotations

import functools
import os
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import comfy.samplers
import torch
from comfy.ldm.modules.attention import wrap_attn
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy_api.latest import io
from nodes import common_ksampler

from . import pack_kinds

SETTINGS = {"scale": 1.0}  # a node sets them, and code reads them through another function
FACTOR = 1.0


class Gain:
    """An object with state."""

    def __init__(self, value: float) -> None:
        self.value, self.calls = value, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.value**self.calls


class Mixer(torch.nn.Module):
    """A network of a pack, with weights that are in no file."""

    def __init__(self, size: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.mix = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.SiLU())
        self.register_buffer("bias", torch.full((size,), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x) + self.bias


class Config(NamedTuple):
    weight: torch.Tensor
    dice: random.Random


def _post_cfg(function: Callable[[dict[str, Any]], torch.Tensor], model: ModelPatcher) -> None:
    model.set_model_sampler_post_cfg_function(function)


def _model_sampling(model: ModelPatcher) -> None:
    sampling, gain = model.get_model_object("model_sampling"), Gain(0.97)

    @torch.no_grad()
    def through_the_model(args: dict[str, Any]) -> torch.Tensor:
        share = model.model.model_sampling.timestep(args["sigma"]) / sampling.timestep(sampling.sigma_max)
        return gain(args["denoised"]) * (1 - 0.1 * share.mean().cpu().item())

    _post_cfg(through_the_model, model)


def _network(model: ModelPatcher) -> None:
    mixer = Mixer(16)

    def mixed(args: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            return args["denoised"] + 0.05 * mixer(args["denoised"].movedim(1, -1)).movedim(-1, 1)

    _post_cfg(mixed, model)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS["scale"] * FACTOR


def _settings(model: ModelPatcher) -> None:
    global FACTOR
    SETTINGS["scale"], FACTOR = 0.9, 0.95
    _post_cfg(lambda args: _scaled(args["denoised"]), model)


def _dice(model: ModelPatcher) -> None:
    random.seed(11)
    _post_cfg(lambda args: args["denoised"] * random.uniform(0.9, 1.1), model)


def _cfg(model: ModelPatcher) -> None:
    config = Config(torch.tensor(0.9), random.Random(7))
    function = functools.partial(_weighed, config, 1.1)
    model.set_model_sampler_cfg_function(function)


def _weighed(config: Config, factor: float, args: dict[str, Any]) -> torch.Tensor:
    weight = config.weight * factor + 0.1 * config.dice.random()
    return args["uncond"] + (args["cond"] - args["uncond"]) * args["cond_scale"] * weight


def _wrapper(model: ModelPatcher) -> None:
    gain = Gain(1.02)

    def around(evaluate: Any, args: dict[str, Any]) -> torch.Tensor:
        x, out = args["input"], evaluate(args["input"], args["timestep"], **args["c"])
        return gain(out) - 0.05 * x.mean(dim=tuple(range(x.ndim)), keepdim=True)

    model.set_model_unet_function_wrapper(around)


def _outer_sample(model: ModelPatcher) -> None:
    def around(executor: Any, noise: Any, latent: Any, sampler: Any, sigmas: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(noise, latent, sampler, sigmas * 0.97, *args, **kwargs)

    model.add_wrapper_with_key("outer_sample", "cp_test", around)


def _swap(model: ModelPatcher) -> None:
    """Swaps a method of the network while it is evaluated, as step caches of packs do."""

    def around(evaluate: Any, args: dict[str, Any]) -> torch.Tensor:
        layer = evaluate.__self__.diffusion_model.double_blocks[0].img_mlp
        before = layer.forward
        layer.forward = lambda x: before(x) - 0.05 * before(x).mean(dim=1, keepdim=True)
        try:
            return evaluate(args["input"], args["timestep"], **args["c"])
        finally:
            del layer.forward

    model.set_model_unet_function_wrapper(around)


def _method(model: ModelPatcher) -> None:
    """Replaces the forward of one layer, by one that sees all tokens."""
    name = "diffusion_model.double_blocks.0.img_mlp"

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = type(self).forward(self, x)
        return out - 0.05 * out.mean(dim=1, keepdim=True)

    model.add_object_patch(f"{name}.forward", types.MethodType(forward, model.get_model_object(name)))


def _layer(model: ModelPatcher) -> None:
    """Uses a layer of the network outside of it."""
    layer = model.model.diffusion_model.img_in
    _post_cfg(lambda args: args["denoised"] * (1 + 0.01 * layer(torch.ones(1, 64)).mean().item()), model)


def _attention(model: ModelPatcher) -> None:
    """Sees all queries at once, which a part of the tokens would change."""

    def attend(function: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q = q - 0.1 * q.mean(dim=2 if kwargs.get("skip_reshape") else 1, keepdim=True)
        return function(q, *args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = attend


def get_sage_func(factor: float) -> Callable[..., torch.Tensor]:
    """Makes an attention as KJNodes does, under the names that it has there."""

    def sage_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(factor * q, k, v, attn_mask=mask)

    sage_func = torch.compiler.disable()(sage_func)

    @wrap_attn
    def attention_sage(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: Any = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        if not skip_reshape:
            q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        out = sage_func(q, k, v, mask)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    return attention_sage


def _sage(model: ModelPatcher) -> None:
    new_attention = get_sage_func(0.8)

    def attention_override_sage(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return new_attention.__wrapped__(*args, **kwargs)

    model.model_options["transformer_options"]["optimized_attention_override"] = attention_override_sage


def _block(model: ModelPatcher) -> None:
    def replaced(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        return {**out, "img": out["img"] - 0.05 * out["img"].mean(dim=1, keepdim=True)}

    model.set_model_patch_replace(replaced, "dit", "double_block", 0)


def _tokens(model: ModelPatcher) -> None:
    model.set_model_attn2_patch(lambda n, context, value, extra: (n - 0.1 * n.mean(1, keepdim=True), context, value))


def _picture(model: ModelPatcher) -> None:
    model.set_model_output_block_patch(lambda h, skip, options: (h * 1.05 - 0.02 * h.mean((2, 3), keepdim=True), skip))


ON_MODEL = {function.__name__.removeprefix("_"): function for function in (
    _model_sampling, _network, _settings, _dice, _cfg, _wrapper, _outer_sample, _swap, _method, _layer,
    _attention, _sage, _block, _tokens, _picture)}  # fmt: skip
ON_MODEL |= pack_kinds.ON_MODEL


class Fresh(io.ComfyNode):
    """A node whose output is made anew for each run: code has changed what is in the last one."""

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        return float("nan")


class PackCode(Fresh):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPackCode",
            category="cp test",
            is_dev_only=True,
            inputs=[io.Model.Input("model"), io.Combo.Input("kind", options=list(ON_MODEL))],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, kind: str) -> io.NodeOutput:
        patched = model.clone()
        ON_MODEL[kind](patched)
        return io.NodeOutput(patched)


class Noted:
    """A callback that writes into a file which process calls it, and for the how many-th time."""

    def __init__(self, kind: str, path: str) -> None:
        self.kind, self.path, self.calls = kind, path, 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {self.kind} {self.calls}\n")


class PackCallbacks(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPackCallbacks",
            category="cp test",
            is_dev_only=True,
            inputs=[io.Model.Input("model"), io.String.Input("kinds"), io.String.Input("path")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, kinds: str, path: str) -> io.NodeOutput:
        patched = model.clone()
        for kind in kinds.split():
            patched.add_callback(vars(CallbacksMP)[kind], Noted(kind, path))
        return io.NodeOutput(patched)


class TiltGuider(comfy.samplers.CFGGuider):
    """A guider with arguments, attributes and a cfg of its own."""

    def __init__(self, model: ModelPatcher, cfgs: list[float], gain: Gain) -> None:
        super().__init__(model)
        self.cfg, self.gain, self.steps = cfgs, gain, 0

    def predict_noise(self, x: Any, timestep: Any, model_options: Any = None, seed: Any = None) -> Any:
        cfg = self.cfg[min(self.steps, len(self.cfg) - 1)]
        self.steps += 1
        conds = self.conds.get("negative"), self.conds.get("positive")
        out = comfy.samplers.sampling_function(self.inner_model, x, timestep, *conds, cfg, model_options, seed)
        return self.gain(out)


def _dimmed(forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return 0.9 * forward(*args, **kwargs)


class SwitchingGuider(TiltGuider):
    """Has the network compute otherwise while it samples, as packs' guiders for NAG do."""

    def sample(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        network = self.model_patcher.model.diffusion_model
        network.forward = types.MethodType(functools.partial(_dimmed, type(network).forward), network)
        try:
            return super().sample(*args, **kwargs)
        finally:
            del network.forward


class PackGuider(Fresh):
    @classmethod
    def define_schema(cls) -> io.Schema:
        sockets = [io.Model.Input("model"), io.Conditioning.Input("positive"), io.Conditioning.Input("negative")]
        return io.Schema(
            node_id="CPTestPackGuider", category="cp test", is_dev_only=True,
            inputs=[*sockets, io.Boolean.Input("switches", optional=True)], outputs=[io.Guider.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, model: ModelPatcher, positive: list, negative: list, switches: bool = False) -> io.NodeOutput:
        guider = (SwitchingGuider if switches else TiltGuider)(model, [3.0, 2.0], Gain(0.98))
        guider.set_conds(positive, negative)
        return io.NodeOutput(guider)


def leaves_state(
    model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: Any = None, callback: Any = None,
    disable: Any = None, state: Any = None, seen: Any = None, blend: Any = None,
) -> torch.Tensor:  # fmt: skip
    """An algorithm that notes what it has seen, for the node that reads it."""
    for step in range(len(sigmas) - 1):
        denoised = model(x, sigmas[step] * x.new_ones([x.shape[0]]), **(extra_args or {}))
        state[f"step {step}"] = denoised.cpu()
        seen.append((step, float(sigmas[step])))
        if callback is not None:
            callback({"x": x, "i": step, "sigma": sigmas[step], "sigma_hat": sigmas[step], "denoised": denoised})
        x = blend(x, denoised, sigmas[step + 1] / sigmas[step])
    return x


class PackSampler(Fresh):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPackSampler", category="cp test", is_dev_only=True, outputs=[io.Sampler.Output()]
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        def blend(x: torch.Tensor, denoised: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
            return torch.lerp(denoised, x, share)

        options = {"state": {}, "seen": [], "blend": blend}
        return io.NodeOutput(comfy.samplers.KSAMPLER(functools.partial(leaves_state), options))


class LeftByPack(Fresh):
    """LATENT of what the algorithm of CPTestPackSampler has left in this process."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestLeftByPack",
            category="cp test",
            is_dev_only=True,
            inputs=[io.Sampler.Input("sampler"), io.Latent.Input("latent")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, sampler: Any, latent: dict[str, Any]) -> io.NodeOutput:
        options = sampler.extra_options
        left = options["state"]["step 1"] * options["seen"][1][1]
        return io.NodeOutput({**latent, "samples": left})


class PackPair(Fresh):
    """A MODEL and a SAMPLER that share an object: each step of one sees what the other has left in it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPackPair", category="cp test", is_dev_only=True, inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output(), io.Sampler.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, model: ModelPatcher) -> io.NodeOutput:
        changed, gain = model.clone(), Gain(0.9)
        _post_cfg(lambda args: gain(args["denoised"]), changed)

        def blend(x: torch.Tensor, denoised: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
            return torch.lerp(denoised, x, share * 0.8**gain.calls)

        options = {"state": {}, "seen": [], "blend": blend}
        return io.NodeOutput(changed, comfy.samplers.KSAMPLER(leaves_state, options))


class PackKSampler(io.ComfyNode):
    """A sampler node of a pack."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        prompts = [io.Conditioning.Input("positive"), io.Conditioning.Input("negative")]
        widgets = [io.Int.Input("seed"), io.Int.Input("steps", default=4), io.Float.Input("cfg", default=2.0)]
        return io.Schema(
            node_id="CPTestPackKSampler", category="cp test", is_dev_only=True,
            inputs=[io.Model.Input("model"), *prompts, io.Latent.Input("latent"), *widgets],
            outputs=[io.Latent.Output()],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: ModelPatcher,
        positive: list,
        negative: list,
        latent: dict[str, Any],
        seed: int,
        steps: int,
        cfg: float,
    ) -> io.NodeOutput:
        return io.NodeOutput(*common_ksampler(model, seed, steps, cfg, "euler", "simple", positive, negative, latent))


NODES = [PackCode, PackCallbacks, PackGuider, PackSampler, LeftByPack, PackPair, PackKSampler]
