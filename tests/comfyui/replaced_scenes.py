"""Another pack has replaced ComfyUI's own code in ComfyUI's process: what a run on the workers makes of it."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .callback_scenes import ONE, demo, errors, remote, run_arguments
from .pack import node_module, pack_module

import comfy.gligen  # isort: skip  # the scenes have made ComfyUI importable
import comfy.ldm.flux.layers  # isort: skip
import comfy.ldm.modules.attention  # isort: skip
import comfy.lora  # isort: skip
import comfy.k_diffusion.sampling  # isort: skip
import comfy.model_base  # isort: skip
import comfy.model_management  # isort: skip
import comfy.ops  # isort: skip
import comfy.patcher_extension  # isort: skip
import comfy.sample  # isort: skip
import comfy.samplers  # isort: skip
import folder_paths  # isort: skip
import torch  # isort: skip

OUTER_SAMPLE = comfy.patcher_extension.WrappersMP.OUTER_SAMPLE
describing = node_module("describe.model_files")
foreign, model_patches = node_module("describe.foreign_code"), node_module("describe.model_patches")
packs, replacing = (pack_module(f"parallel_runtime.loading.{name}") for name in ("code_names", "replaced_code"))
FILE = "/somewhere/custom_nodes/a_pack/nodes.py"
SOURCE = """
import functools, torch
from comfy.model_patcher import ModelPatcher

def around(original):
    @functools.wraps(original)
    def replaced(*args, **kwargs):
        out = original(*args, **kwargs)
        return out * 0.5
    return replaced

def kind_of(original):
    class Replaced(original):
        def predict_noise(self, *args, **kwargs):
            return super().predict_noise(*args, **kwargs) * 0.5
    return Replaced

class Layer(torch.nn.Module):
    def __init__(self, original):
        super().__init__()
        self.original = original

    def forward(self, x):
        return self.original(x) * 0.5

class Patcher(ModelPatcher):
    pass
"""
PASSING = """
import functools

class Seen:
    pass

def keeping(original):
    @functools.wraps(original)
    def replaced(tensor, m_mult, m_add=None, modulation_dims=None):
        "Keeps the last one."
        Seen.last = tensor
        return original(tensor, m_mult, m_add, modulation_dims=modulation_dims)
    return replaced

def around(original):
    def replaced(*args, **kwargs):
        return original(*args, **kwargs)
    return replaced

def doubling(original):
    def replaced(tensor, m_mult, m_add=None, modulation_dims=None):
        return original(m_mult, tensor, m_add, modulation_dims)
    return replaced

def defaulting(original):
    def replaced(tensor, m_mult, m_add=1.0, modulation_dims=None):
        return original(tensor, m_mult, m_add, modulation_dims)
    return replaced

def changing(original):
    def replaced(tensor, m_mult, m_add=None, modulation_dims=None):
        tensor.last = m_mult
        return original(tensor, m_mult, m_add, modulation_dims)
    return replaced

def more(original):
    def replaced(*args, **kwargs):
        if "tiled" in kwargs:
            return None
        return original(*args, **kwargs)
    return replaced
"""
KEEPING = """
import functools, types
import comfy.samplers, torch

COUNT, SEEN, STORE = 0, [], types.SimpleNamespace(last=None, on=False)

def nothing(conds, x, timestep):
    control = conds.get("control")
    conds["get"] = lambda: control
    return x if STORE.on else timestep

def a_variable(conds, x, timestep):
    global COUNT
    COUNT += 1
    return x

def a_list(conds, x, timestep):
    SEEN.append(x)
    return x

def an_attribute(conds, x, timestep):
    STORE.last = x
    return x

@functools.wraps(comfy.samplers.get_area_and_mult)
def under_comfyuis_name(conds, x, timestep):
    SEEN.append(x)
    return x

@torch.no_grad()
def decorated(conds, x, timestep):
    return a_list(conds, x, timestep)

def by_another(conds, x, timestep):
    return an_attribute(conds, x, timestep)

def maker():
    calls = 0
    def a_cell(conds, x, timestep):
        nonlocal calls
        calls += 1
        return x
    return a_cell
a_cell = maker()
"""


def _pack_of(file: str, source: str) -> ModuleType:
    """Returns a pack's module, as it is when ComfyUI has imported this file."""
    module = ModuleType("a_pack")
    module.__file__ = file
    sys.modules["a_pack"] = module
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return module


a_pack = _pack_of(FILE, SOURCE)

PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {  # of a MODEL
    "a function of the loop": lambda model: (comfy.samplers, "sampling_function"),
    "a method of the loop": lambda model: (comfy.samplers.CFGGuider, "predict_noise"),
    "a class of the loop": lambda model: (comfy.samplers, "CFGGuider"),
    "a method of the model": lambda model: (comfy.model_base.BaseModel, "_apply_model"),
    "an algorithm": lambda model: (comfy.k_diffusion.sampling, "sample_euler"),
    "an algorithm of its own": lambda model: (comfy.k_diffusion.sampling, "sample_of_a_pack"),
    "a function of the network": lambda model: (comfy.ldm.flux.layers, "apply_mod"),
    "a method of the network": lambda model: (comfy.ldm.flux.layers.SingleStreamBlock, "forward"),
    "a method of layers": lambda model: (comfy.ops.disable_weight_init.Linear, "forward"),
    "a function of layers": lambda model: (comfy.ops, "scaled_dot_product_attention"),
    "a method of torch": lambda model: (torch.nn.SiLU, "forward"),
    "a function of torch.nn": lambda model: (torch.nn.functional, "layer_norm"),
    "attention, by another function of ComfyUI's": lambda model: (comfy.ldm.flux.math, "optimized_attention"),
    "torch's attention": lambda model: (torch.nn.functional, "scaled_dot_product_attention"),
    "a function of torch": lambda model: (torch, "addcmul"),
    "a function that merges": lambda model: (comfy.lora, "calculate_weight"),
    "an object's method": lambda model: (model.model, "apply_model"),
    "a layer": lambda model: (model.model.diffusion_model, "final_layer"),
    "a MODEL's method": lambda model: (model, "model_dtype"),
    "a MODEL's class": lambda model: (model, "__class__"),
}


def passed_on(rank: int, world: int, folder: str) -> dict[str, bool]:
    """By a pack's function in place of one of the network: does the check take it for the original?"""
    file = Path(folder) / "custom_nodes" / "passing" / "nodes.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(PASSING, encoding="utf-8")
    pack = _pack_of(str(file), PASSING)
    model, layers = demo.CPDemoModel.execute().result[0], comfy.ldm.flux.layers
    original, found = layers.apply_mod, {}
    for name in ("keeping", "around", "doubling", "defaulting", "changing", "more"):
        with _replaced(layers, "apply_mod", vars(pack)[name](original)):
            found[name] = not foreign.replaced_on(model)
    with _replaced(layers, "apply_mod", pack.around(pack.keeping(original))):
        found["twice"] = not foreign.replaced_on(model)
    with _replaced(layers, "apply_mod", pack.around(a_pack.around(original))):
        found["around a change"] = not foreign.replaced_on(model)
    with _replaced(layers, "apply_mod", pack.keeping(layers.attention)):
        found["to another"] = not foreign.replaced_on(model)
    changed = pack.around(original)
    file.write_text(PASSING.replace("return original(*args, **kwargs)", "return original(*args)"), encoding="utf-8")
    replacing._definition.cache_clear()
    with _replaced(layers, "apply_mod", changed):
        found["of a file that has changed"] = not foreign.replaced_on(model)
    return found


def kept_between_evaluations(rank: int, world: int) -> list[str]:
    """The functions of a pack, each in place of one that is called for each prompt, that keep something."""
    pack = _pack_of("/somewhere/custom_nodes/keeping/nodes.py", KEEPING)
    names = (
        "nothing",
        "a_variable",
        "a_list",
        "an_attribute",
        "under_comfyuis_name",
        "decorated",
        "by_another",
        "a_cell",
    )
    folder_paths.add_model_folder_path("custom_nodes", "/somewhere/custom_nodes")
    packs._pack_of.cache_clear()
    each = {name: replacing.Replaced("comfy.samplers.get_area_and_mult", vars(pack)[name]) for name in names}
    return [name for name, one in each.items() if foreign.couples_evaluations(one)]


def coupled_by_replaced_code(rank: int, world: int) -> list[bool]:
    """Do prompts and images stay together where a pack has replaced a method of layers; and where its function says
    that it computes each token?"""
    plain, declared = (a_pack.around(torch.nn.SiLU.forward) for _ in range(2))
    declared.context_parallel = "each token"
    each = (replacing.Replaced("torch.nn.modules.activation.SiLU.forward", one) for one in (plain, declared))
    return [foreign.CodeForGood([one]).couples for one in each]


def attention_set_before_us(rank: int, world: int) -> bool:
    """Do we know ComfyUI's own choice of attention where a pack that was imported before us has set another?"""
    attention = comfy.ldm.modules.attention
    with _replaced(attention, "optimized_attention", attention.attention_sub_quad):
        return replacing._chosen_attention() is replacing.CHOSEN_ATTENTION


def after_a_patched_run(rank: int, world: int, unloaded: bool) -> bool:
    """Do workers sample a MODEL, equally, whose clone with a replaced method ComfyUI has sampled before, and has
    `unloaded` since?"""
    model = demo.CPDemoModel.execute().result[0]
    want = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
    patched = model.clone()
    name = "diffusion_model.time_in.silu.forward"
    patched.add_object_patch(name, a_pack.around(model.get_model_object(name)))
    assert not torch.equal(comfy.sample.sample(patched, *run_arguments(), disable_pbar=True, seed=5), want)
    if unloaded:
        comfy.model_management.unload_all_models()
    got = comfy.sample.sample(remote.model_on_workers(model, ONE), *run_arguments(), disable_pbar=True, seed=5)
    return torch.equal(got, want)


def callbacks_called(rank: int, world: int, names: list[str]) -> dict[str, list[Any]]:
    """How often a callback, of a pack that no worker has, is called: natively and with CP Sampler, each by two runs of
    a MODEL and its end; or "refused". By the name of its kind."""
    return {name: [*_calls(vars(comfy.patcher_extension.CallbacksMP)[name])] for name in names}


def replaced_without_a_pack(rank: int, world: int, what: str) -> list[str]:
    """The names of what of a network's code is found to be replaced, by what has no file of a pack."""
    network = torch.nn.Sequential(torch.nn.SiLU(), comfy.ldm.flux.layers.EmbedND(4, 4, [4]))
    layers, silu, hook = comfy.ldm.flux.layers, torch.nn.SiLU.forward, None
    embedding = layers.timestep_embedding
    made: dict[str, Any] = {}
    exec("def forward(self, x): return x", made)
    try:
        match what:
            case "another class":
                torch.nn.SiLU.forward = torch.nn.Softsign.forward
            case "no file":
                torch.nn.SiLU.forward = made["forward"]
            case "other arguments":
                layers.timestep_embedding = functools.partial(embedding, time_factor=500.0)
            case "a hook on all":
                hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        return [one.name for one in replacing.replaced_in_network(network)]
    finally:
        torch.nn.SiLU.forward, layers.timestep_embedding = silu, embedding
        if hook is not None:
            hook.remove()


def why_no_gligen(rank: int, world: int, inside: bool) -> str:
    """Why a prompt with GLIGEN is not sent, or what a network's blocks with it are refused for, whose code a pack has
    replaced."""
    gligen = comfy.gligen.Gligen([], comfy.gligen.PositionNet(8, 8), 8)
    patcher = comfy.model_patcher.ModelPatcher(gligen, *[torch.device("cpu")] * 2)
    attend = a_pack.around(comfy.gligen.Gligen._set_position)
    with _replaced(comfy.gligen.Gligen, "_set_position", attend):
        try:
            if inside:
                patch = types.MethodType(comfy.gligen.Gligen.set_empty, gligen)
                model_patches.describe_transformer_options({"patches": {"middle_patch": [patch]}})
            describing.describer().describe(("position", patcher, []), "the CONDITIONING")
        except errors.Refused as refused:
            return str(refused)
    return ""


def callback_names(rank: int, world: int) -> list[str]:
    """The names of the kinds of callbacks that this ComfyUI has."""
    return [name for name in vars(comfy.patcher_extension.CallbacksMP) if name.isupper()]


def _calls(kind: str) -> Iterator[int | str]:
    for on_workers in (False, True):
        seen: list[str] = []

        def called(*args: Any, seen: list[str] = seen, **kwargs: Any) -> None:
            seen.append("called")

        called.__module__ = "custom_nodes.a_pack"
        model = demo.CPDemoModel.execute().result[0].clone()
        model.add_callback(kind, called)
        try:
            for _ in range(2):
                sampled = remote.model_on_workers(model, ONE) if on_workers else model
                comfy.sample.sample(sampled, *run_arguments(), disable_pbar=True, seed=5)
        except errors.Refused as refused:
            yield "refused" if f"the {kind} callback custom_nodes.a_pack." in str(refused) else str(refused)
            continue
        comfy.model_management.unload_all_models()
        del sampled, model
        gc.collect()
        yield len(seen)


def with_clones_for_gpus(rank: int, world: int) -> dict[str, Any]:
    """A run of a MODEL with a clone for a second GPU, as MultiGPU CFG Split puts it there, and one whose loop stays in
    ComfyUI's process: is the latent equal, why does the loop stay, and has ComfyUI loaded the clone?"""
    model, clone = (demo.CPDemoModel.execute().result[0] for _ in range(2))
    want = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
    comfy.model_management.unload_all_models()
    split = model.clone()
    clone.is_multigpu_base_clone = True
    split.set_additional_models("multigpu", [clone])
    stepwise = split.clone()
    stepwise.add_wrapper_with_key(OUTER_SAMPLE, "a_pack", _pass)
    answers = {}
    for name, one in {"in the workers": split, "in ComfyUI's process": stepwise}.items():
        with _heard() as heard:
            sampled = remote.model_on_workers(one, ONE)
            got = comfy.sample.sample(sampled, *run_arguments(), disable_pbar=True, seed=5)
        loaded = [entry.model.model for entry in comfy.model_management.current_loaded_models]
        answers[name] = {
            "equal": torch.equal(got, want),
            "stays": any("another pack" in line or "_pass" in line for line in heard.lines),
            "said": len(heard.lines),
            "clone loaded": any(one is clone.model for one in loaded) or clone.loaded_size() > 0,
        }
    return answers


def _pass(executor: Any, *args: Any, **kwargs: Any) -> Any:
    return executor(*args, **kwargs)


def sampled_with(rank: int, world: int, replaced: str) -> dict[str, Any]:
    """Does a run give ComfyUI's latent while this is replaced, and where did its loop run; or the refusal."""
    model = demo.CPDemoModel.execute().result[0]
    plain = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
    owner, name = PLACES[replaced](model)
    if replaced == "a function that merges":
        weight = next(key for key in model.model.state_dict() if key.endswith("img_attn.proj.weight"))
        model.add_patches({weight: (torch.ones_like(model.model.state_dict()[weight]) * 0.01,)})
    try:
        with _heard() as heard, _replaced(owner, name, _of_the_pack(replaced, getattr(owner, name, None))):
            got = comfy.sample.sample(remote.model_on_workers(model, ONE), *run_arguments(), disable_pbar=True, seed=5)
            want = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
    except errors.Refused as refused:
        return {"refused": str(refused)}
    return {"does something": not torch.equal(want, plain), "equal": torch.equal(got, want), "said": heard.lines}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """As a pack does it, and taken back: also for a class and a layer, which `unittest.mock` would delete."""
    before, of_kind = getattr(owner, name, None), hasattr(type(owner), name) and name not in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None or (of_kind and name != "__class__"):
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def _heard() -> Iterator[Heard]:
    heard, log = Heard(), logging.getLogger(remote.__name__)
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        log.removeHandler(heard)


def _of_the_pack(replaced: str, original: Any) -> Any:
    if replaced == "attention, by another function of ComfyUI's":
        return comfy.ldm.modules.attention.attention_sub_quad
    if replaced == "a layer":
        return a_pack.Layer(original)
    if replaced == "a MODEL's class":
        return a_pack.Patcher
    return a_pack.kind_of(original) if isinstance(original, type) else a_pack.around(original or _leave)


def _leave(x: torch.Tensor) -> torch.Tensor:
    return x


class Heard(logging.Handler):
    """Why the loop stays in ComfyUI's process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "because" in (line := record.getMessage()):
            self.lines.append(line.partition(" because ")[2])
