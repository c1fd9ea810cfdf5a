"""A test-only pack that replaces code of ComfyUI's and torch's as it is imported, in the workers too; as
`cp_otherwise`, in the workers alone. A node replaces more, in ComfyUI's process alone."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import comfy.hooks
import comfy.k_diffusion.sampling
import comfy.samplers
import torch

ORIGINAL = comfy.samplers.sampling_function
SETTINGS = {"gain": 1.0}
NAME = os.path.basename(os.path.dirname(__file__))


class Store:
    """Keeps what was replaced, and what each run, also a native one, leaves there."""

    sample: Callable[..., Any]
    sigmas: torch.Tensor


STORE = Store()


def _noting_sigmas(sampler: Any, model_wrap: Any, sigmas: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    STORE.sigmas = sigmas
    return STORE.sample(sampler, model_wrap, sigmas, *args, **kwargs)


def _times(factor: float, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * factor * SETTINGS["gain"]

    return replaced


def _darker(args: dict[str, Any]) -> Any:
    return args["denoised"] * 0.9


def _steps(
    share: float, model: Any, noise: Any, sigmas: Any, extra_args: Any, callback: Any = None, disable: Any = None
) -> Any:
    """Euler's steps, each a `share` of one."""
    x = noise
    for step, sigma in enumerate(sigmas[:-1]):
        denoised = model(x, sigma * x.new_ones(x.shape[0]), **extra_args)
        x = x + share * (x - denoised) / sigma * (sigmas[step + 1] - sigma)
        if callback is not None:
            callback({"x": x, "i": step, "sigma": sigma, "sigma_hat": sigma, "denoised": denoised})
    return x


class Stepping:
    """A sampler that is registered as an object."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _steps(self.share, *args, **kwargs)


class SteppingOnce:
    """A sampler that is registered as a class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _steps(0.85, *args, **kwargs)


class OwnSampler(comfy.samplers.Sampler):
    """A SAMPLER without a sampler function."""

    def __init__(self, share: float) -> None:
        self.share = share

    def sample(
        self, model_wrap: Any, sigmas: Any, extra_args: Any, callback: Any, noise: Any, latent_image: Any = None,
        denoise_mask: Any = None, disable_pbar: bool = False,
    ) -> Any:  # fmt: skip
        x = noise * sigmas[0]
        for step, sigma in enumerate(sigmas[:-1]):
            denoised = model_wrap(x, sigma * x.new_ones(x.shape[0]), **extra_args)
            x = x + self.share * (x - denoised) / sigma * (sigmas[step + 1] - sigma)
            if callback is not None:
                callback(step, denoised, x, len(sigmas) - 1)
        return x


class Sampler:
    RETURN_TYPES, FUNCTION, CATEGORY = ("SAMPLER",), "make", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    def make(self) -> tuple[Any]:
        return (OwnSampler(0.9),)


def _quadratic(model_sampling: Any, steps: int) -> torch.Tensor:
    """A scheduler."""
    return float(model_sampling.sigma_max) * torch.linspace(1.0, 0.0, steps + 1) ** 2


class Rising(comfy.hooks.WeightHook):
    """A hook with a strength of its own."""

    factor = 1.0

    @property
    def strength(self) -> float:
        return super().strength * self.factor

    def clone(self) -> Any:
        made = super().clone()
        made.factor = self.factor
        return made


class Growing(Rising):
    """A hook that is stronger each time that ComfyUI registers it."""

    def add_hook_patches(self, *args: Any, **kwargs: Any) -> Any:
        self.factor += 1.0
        return super().add_hook_patches(*args, **kwargs)


class Hooks:
    RETURN_TYPES, FUNCTION, CATEGORY = ("HOOKS",), "make", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}, "optional": {"grows": ("BOOLEAN", {"default": False})}}

    def make(self, model: Any, grows: bool = False) -> tuple[Any]:
        weights = model.model.state_dict()
        key = next(name for name in weights if name.endswith("img_mlp.0.weight"))
        hook, group = (Growing if grows else Rising)(0.5, 0.0), comfy.hooks.HookGroup()
        hook.factor, hook.need_weight_init = 2.0, False
        hook.weights = {key: ("diff", (0.1 * torch.ones_like(weights[key], dtype=torch.float32),))}
        group.add(hook)
        return (group,)


class Cloned:
    """A callback for clones, which refers to what cannot be sent."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        lock, patched = threading.Lock(), model.clone()

        def noted(*_: Any) -> None:
            with lock:
                pass

        patched.add_callback("on_clone", noted)
        patched.set_model_sampler_post_cfg_function(_darker)
        return (patched,)


class Replace:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "what": (["nothing", "sampling_function", "gain"],)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def patch(self, model: Any, what: str) -> tuple[Any]:
        comfy.samplers.sampling_function = _times(0.97, ORIGINAL) if what == "sampling_function" else ORIGINAL
        SETTINGS["gain"] = 0.9 if what == "gain" else 1.0
        patched = model.clone()
        patched.set_model_sampler_post_cfg_function(_darker)
        return (patched,)


if NAME == "cp_replacing":
    for name, sampler in (
        ("cp_object", Stepping(0.9)), ("cp_partial", functools.partial(_steps, 0.8)), ("cp_class", SteppingOnce)
    ):  # fmt: skip
        setattr(comfy.k_diffusion.sampling, f"sample_{name}", sampler)
        comfy.samplers.SAMPLER_NAMES.append(name)
        if name not in comfy.samplers.KSampler.SAMPLERS:
            comfy.samplers.KSampler.SAMPLERS.append(name)
    comfy.samplers.SCHEDULER_HANDLERS["cp_quadratic"] = comfy.samplers.SchedulerHandler(_quadratic)
    comfy.samplers.SCHEDULER_NAMES.append("cp_quadratic")
    STORE.sample, comfy.samplers.KSAMPLER.sample = comfy.samplers.KSAMPLER.sample, _noting_sigmas
    comfy.samplers.cfg_function = _times(0.98, comfy.samplers.cfg_function)
    torch.nn.GroupNorm.forward = _times(0.9, torch.nn.GroupNorm.forward)
elif "RANK" in os.environ:
    comfy.samplers.cfg_function = _times(0.5, comfy.samplers.cfg_function)
    torch.nn.RMSNorm.forward = _times(0.5, torch.nn.RMSNorm.forward)

NODE_CLASS_MAPPINGS = {
    f"CPTest {NAME}": Replace,
    f"CPTest {NAME} sampler": Sampler,
    f"CPTest {NAME} hooks": Hooks,
    f"CPTest {NAME} clones": Cloned,
}
