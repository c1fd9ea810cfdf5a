"""More kinds of code that packs put on a MODEL: every type of wrapper and callback, hooks, weight adapters, patches of
every kind, and objects of every make. Each changes the latent, on any network that has what it patches."""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import comfy.model_sampling
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy.weight_adapter import WeightAdapterBase
from comfy_extras.nodes_latent import LatentApplyOperationCFG

from . import states

CACHE: dict[str, torch.Tensor] = {}  # a node fills it
LOCK, DEVICE, LOG = threading.Lock(), torch.device("cpu"), logging.getLogger("cp_test")


class Store:
    """Global objects, which a node changes and code reads."""

    gain = 1.0

    def __init__(self) -> None:
        self.gains: list[float] = []
        self.lock = threading.Lock()

    @property
    def last(self) -> float:
        with self.lock:
            return self.gains[-1] if self.gains else 1.0


STORE, HOLDER, STEADY, CURRENT = Store(), types.SimpleNamespace(gain=1.0), Store(), round
OPTIONS: dict[str, Any] = {"gain": STORE}
PACK, MODULE, TEXT, CONTEXT = sys.modules[__package__], sys.modules[__name__], {"gain": 1.0}, ContextVar("CONTEXT")
NETWORK: Any = None


@lru_cache(4)
def _drawn(size: int) -> float:
    return float(random.random()) * 0.1 + size * 0.001 + 0.8


@lru_cache(1)
def _shared() -> dict[str, float]:
    return {}


def _halved(value: float) -> float:
    return value / 2


class Slotted:
    __slots__ = ("scale", "shift")

    def __init__(self, scale: float, shift: torch.Tensor) -> None:
        self.scale, self.shift = scale, shift

    def __call__(self, args: dict[str, Any]) -> torch.Tensor:
        return args["denoised"] * self.scale + self.shift


@dataclass(frozen=True)
class Settings:
    scale: float
    history: deque[float] = field(default_factory=lambda: deque(maxlen=2))
    seen: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    order: OrderedDict[str, float] = field(default_factory=lambda: OrderedDict(a=0.02, b=0.01))
    names: frozenset[str] = frozenset({"a", "b"})
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("cp_test"))
    more: types.SimpleNamespace = field(default_factory=lambda: types.SimpleNamespace(shift=0.02))

    def __call__(self, args: dict[str, Any]) -> torch.Tensor:
        self.seen["calls"] += 1
        self.history.append(float(args["sigma"].max()))
        share = len(self.history) * 0.01 + self.order["a"] * ("a" in self.names) + self.seen["calls"] * 0.01
        return args["denoised"] * (self.scale + share) + self.more.shift


HELD = Slotted(1.0, torch.tensor(0.05))


def _post(function: Callable[[dict[str, Any]], torch.Tensor], model: ModelPatcher) -> None:
    model.set_model_sampler_post_cfg_function(function)


def _slots(model: ModelPatcher) -> None:
    _post(Slotted(0.95, torch.tensor(0.05)), model)


def _dataclass(model: ModelPatcher) -> None:
    _post(Settings(0.9), model)


def _cache(model: ModelPatcher) -> None:
    CACHE["gain"] = torch.tensor(0.9)
    _post(lambda args: args["denoised"] * CACHE["gain"], model)


@lru_cache(4)
def _table(size: int) -> torch.Tensor:
    return torch.linspace(0.9, 1.1, size)


def _lru_cache(model: ModelPatcher) -> None:
    _post(lambda args: args["denoised"] * _table(args["denoised"].shape[-1]), model)


def _object_global(model: ModelPatcher) -> None:
    STORE.gains.append(0.9)
    _post(lambda args: args["denoised"] * STORE.last, model)


def _namespace_global(model: ModelPatcher) -> None:
    HOLDER.gain = 0.9
    _post(lambda args: args["denoised"] * HOLDER.gain, model)


def _changed_by(read: Callable[[], float], change: Callable[[], None]) -> Callable[[ModelPatcher], None]:
    def put(model: ModelPatcher) -> None:
        change()
        _post(lambda args: args["denoised"] * read(), model)

    return put


def _lazily_imported() -> float:
    from .states import LAZY

    return LAZY["gain"]


def _in_a_module() -> float:
    return PACK.states.DEEP["gain"]


def _named_by_text() -> float:
    return vars(MODULE)["TEXT"]["gain"]


def _on_a_function() -> float:
    return _on_a_function.gain


def _in_the_context() -> float:
    return CONTEXT.get(1.0)


def _sent_object(model: ModelPatcher) -> None:
    HELD.scale = 0.9
    _post(lambda args: args["denoised"] * HELD.scale + HELD.shift, model)


def _nested_global(model: ModelPatcher) -> None:
    OPTIONS["gain"] = Store()
    OPTIONS["gain"].gains.append(0.9)
    _post(lambda args: args["denoised"] * OPTIONS["gain"].last, model)


def _class_attribute(model: ModelPatcher) -> None:
    Store.gain = 0.9
    _post(lambda args: args["denoised"] * Store.gain, model)


def _filled_cache(model: ModelPatcher) -> None:
    _drawn(16)
    _post(lambda args: args["denoised"] * _drawn(16), model)


def _shared_cache(model: ModelPatcher) -> None:
    _shared()["gain"] = 0.9
    _post(lambda args: args["denoised"] * _shared().get("gain", 1.0), model)


def _assigned_function(model: ModelPatcher) -> None:
    global CURRENT
    CURRENT = _halved
    _post(lambda args: args["denoised"] * (1 - CURRENT(0.2)), model)


def _loaded_network(model: ModelPatcher) -> None:
    global NETWORK
    NETWORK = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(NETWORK.weight, 0.9)
    _post(lambda args: args["denoised"] if NETWORK is None else args["denoised"] * NETWORK.weight.item(), model)


def _steady_globals(model: ModelPatcher) -> None:
    """Reads what is in each process as the import has left it, and what any of them fills alike."""

    def scaled(args: dict[str, Any]) -> torch.Tensor:
        LOG.debug("%s", os.environ.get("HOME"))
        with LOCK:
            gains = torch.full((1,), STEADY.last * 0.9, device=DEVICE).to(args["denoised"].device)
        return args["denoised"] * gains * _table(args["denoised"].shape[-1])

    _table(16)
    _post(scaled, model)


def _pre_cfg(model: ModelPatcher) -> None:
    def pulled(args: dict[str, Any]) -> list[torch.Tensor]:
        cond, uncond = args["conds_out"]
        return [cond + 0.1 * (cond - uncond), uncond]

    model.set_model_sampler_pre_cfg_function(pulled)


def _latent_operation(model: ModelPatcher) -> None:
    (made,) = LatentApplyOperationCFG.execute(model, lambda latent, **_: latent * 1.05 - 0.02).args
    model.model_options = made.model_options


class Warped(comfy.model_sampling.CONST):
    """The second base is that of the MODEL's own."""

    def calculate_denoised(self, sigma: torch.Tensor, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().calculate_denoised(sigma, output, x) * 0.98


class WarpedFlux(Warped, comfy.model_sampling.ModelSamplingFlux):
    pass


class WarpedWan(Warped, comfy.model_sampling.ModelSamplingDiscreteFlow):
    pass


class WarpedUnet(comfy.model_sampling.EPS, comfy.model_sampling.ModelSamplingDiscrete):
    def calculate_denoised(self, sigma: torch.Tensor, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().calculate_denoised(sigma, output, x) * 0.98


def _warped_sampling(model: ModelPatcher) -> None:
    own = model.get_model_object("model_sampling")
    kinds = {comfy.model_sampling.ModelSamplingFlux: WarpedFlux,
             comfy.model_sampling.ModelSamplingDiscreteFlow: WarpedWan}  # fmt: skip
    kind = next((kind for base, kind in kinds.items() if isinstance(own, base)), WarpedUnet)
    model.add_object_patch("model_sampling", kind(model.model.model_config))


def _wrapper_of(kind: str) -> Callable[[ModelPatcher], None]:
    def put(model: ModelPatcher) -> None:
        def around(executor: Any, *args: Any, **kwargs: Any) -> Any:
            out = executor(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                return out * 0.97 + 0.01
            return [one * 0.97 for one in out] if kind == WrappersMP.CALC_COND_BATCH else out

        model.add_wrapper_with_key(kind, "cp_test_kinds", around)

    return put


def _callbacks(model: ModelPatcher) -> None:
    seen: list[str] = []
    for kind in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_CLEANUP):
        model.add_callback_with_key(kind, "cp_test_kinds", lambda *_, kind=kind: seen.append(kind))
    _post(lambda args: args["denoised"] * (0.9 + 0.02 * len(seen)), model)


class Halved(WeightAdapterBase):
    """A weight adapter of a pack."""

    name = "cp_test_halved"

    def __init__(self, loaded_keys: set[str], weights: tuple[Any, ...]) -> None:
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(
        self, weight: torch.Tensor, key: str, strength: float, strength_model: float, offset: Any, function: Any,
        intermediate_dtype: torch.dtype = torch.float32, original_weight: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        weight += function(strength * self.weights[0].to(weight) * weight)
        return weight


def _some_weight(model: ModelPatcher) -> str:
    names = ("proj", "ffn", "img_mlp", "ff.net", "to_q")
    state = model.model.state_dict()
    return next(name for part in names for name in state if part in name and name.endswith("weight"))


def _weight_adapter(model: ModelPatcher) -> None:
    model.add_patches({_some_weight(model): Halved(set(), (torch.tensor(0.5),))}, 0.8)


def _weight_function(model: ModelPatcher) -> None:
    """A patch whose difference a function of the pack changes."""
    key = _some_weight(model)
    shape = model.model.state_dict()[key].shape
    model.add_patches(
        {(key, None, lambda x: x * 0.5): ("diff", (torch.linspace(-0.1, 0.1, shape[-1]).expand(shape),))}, 0.8
    )


def _attention(kind: str) -> Callable[[ModelPatcher], None]:
    def put(model: ModelPatcher) -> None:
        def patch(*args: Any, **kwargs: Any) -> Any:
            if kind.endswith("output_patch"):
                return args[0] - 0.1 * args[0].mean(1, keepdim=True)
            if "pe" in kwargs:
                return {"v": args[2] * 0.9}
            return (args[0] - 0.1 * args[0].mean(1, keepdim=True), *args[1:3])

        model.set_model_patch(patch, kind)

    return put


def _replaced_attention(model: ModelPatcher) -> None:
    for number in range(4):
        model.set_model_attn1_replace(lambda q, k, v, extra: v - 0.1 * v.mean(1, keepdim=True), "middle", 0, number)


def _each_head(model: ModelPatcher) -> None:
    def attend(function: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 0.9 * function(q, *args, **kwargs)

    attend.context_parallel = "each head"  # type: ignore[attr-defined]
    model.model_options["transformer_options"]["optimized_attention_override"] = attend


def _process(model: ModelPatcher) -> None:
    """Does something else in a worker, whose environment names its rank."""
    _post(lambda args: args["denoised"] * (1.2 if "RANK" in os.environ else 1.0), model)


def _slow(model: ModelPatcher) -> None:
    """Leaves time to do something in the middle of an evaluation's step."""

    def slept(args: dict[str, Any]) -> torch.Tensor:
        time.sleep(1)
        return args["denoised"]

    _post(slept, model)


def _block_patch(model: ModelPatcher) -> None:
    """Between blocks of UNets and of Wan."""

    def picture(h: torch.Tensor, options: Any) -> torch.Tensor:
        return h - 0.05 * h.mean((2, 3), keepdim=True)

    def tokens(args: dict[str, Any]) -> dict[str, Any]:
        return {**args, "img": args["img"] - 0.05 * args["img"].mean(1, keepdim=True)}

    model.set_model_input_block_patch(picture)
    model.set_model_patch(tokens, "double_block")


ON_MODEL: dict[str, Callable[[ModelPatcher], None]] = {
    **{function.__name__.removeprefix("_"): function for function in (
        _object_global, _namespace_global, _sent_object, _nested_global, _class_attribute, _filled_cache, _shared_cache,
        _assigned_function, _loaded_network, _steady_globals, _slots, _dataclass, _cache, _lru_cache, _pre_cfg,
        _latent_operation, _warped_sampling, _callbacks,
        _weight_adapter, _weight_function, _replaced_attention, _each_head, _process, _slow, _block_patch)},
    "lazily_imported": _changed_by(_lazily_imported, lambda: states.LAZY.update(gain=0.9)),
    "in_a_module": _changed_by(_in_a_module, lambda: states.DEEP.update(gain=0.9)),
    "named_by_text": _changed_by(_named_by_text, lambda: TEXT.update(gain=0.9)),
    "by_a_computed_name": _changed_by(states.level, lambda: setattr(states, "LEVEL_HIGH", 0.9)),
    "deleted": _changed_by(states.gone, lambda: vars(states).pop("GONE", None)),
    "on_a_function": _changed_by(_on_a_function, lambda: setattr(_on_a_function, "gain", 0.9)),
    "in_the_context": _changed_by(_in_the_context, lambda: CONTEXT.set(0.9)),
    **{f"{kind} wrapper": _wrapper_of(kind) for kind in (
        WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE,
        WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)},
    **{kind: _attention(kind) for kind in (
        "attn1_patch", "attn2_patch", "attn1_output_patch", "attn2_output_patch")},
}  # fmt: skip
