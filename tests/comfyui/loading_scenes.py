"""How a worker loads a file, as on a host with a GPU: no GPU is needed for the part that the file's dtypes show."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..zoo.checkpoints import write
from .pack import node_module, pack_module
from .write_formats import written

import comfy.memory_management  # isort: skip  # the pack's module has made ComfyUI importable
import comfy.model_management  # isort: skip
import comfy.ops  # isort: skip
import comfy.sd  # isort: skip
from comfy import weight_adapter  # isort: skip
from comfy.model_patcher import LowVramPatch  # isort: skip

comfy_model, additional, patcher = (
    pack_module(f"parallel_runtime.worker.comfy_loop.{name}")
    for name in ("comfy_model", "additional_models", "patcher")
)
mapped, specs = pack_module("parallel_runtime.loading.mapped"), pack_module("parallel_runtime.specs")
parallel = pack_module("parallel_runtime.request")
aligned = comfy.memory_management.vram_aligned_size
ROUNDED, CPU = "float8_e4m3fn", torch.device("cpu")


def loaded(folder: str, *, dynamic_vram: bool, quantised: str = "") -> Any:
    """A MODEL of this rank whose file is rounded as it is loaded, or `quantised` in this format."""
    path, dtype = write(Path(folder), "flux_schnell"), "bfloat16" if quantised else ROUNDED
    if quantised:
        save_file(written(load_file(path), quantised)[0], path)
    options = {"dtype": {"torch.dtype": dtype}}
    spec = specs.ModelSpec(
        loader="comfy.sd:load_diffusion_model", arguments=json.dumps([str(path), options]), weight_dtype=dtype,
        dynamic_vram=dynamic_vram,
    )  # fmt: skip
    model = comfy_model.load(additional.AdditionalModels(), spec, CPU, lambda done: None, None)
    clone = model.patcher.clone()
    clone.on_progress = lambda done: None
    return clone


def rounded(rank: int, world: int, folder: str, dynamic_vram: bool) -> dict[str, list[str]]:
    """The dtypes of small and of large layers, and of those of them that a patch is merged into."""
    model = loaded(folder, dynamic_vram=dynamic_vram)
    modules = model.model.named_modules()
    layers = {name: layer for name, layer in modules if getattr(layer, "weight", None) is not None}
    assert all(hasattr(layer, "comfy_cast_weights") for layer in layers.values())
    large = {name for name, layer in layers.items() if comfy.model_management.module_size(layer) > 16 * 1024}
    merged = [next(name for name in layers if (name in large) == of_large) for of_large in (False, True)]
    ones = {f"{name}.weight": torch.ones(layers[name].weight.shape) for name in merged}
    model.add_patches({key: (value,) for key, value in ones.items()})
    model.partially_load(CPU)
    groups = {"small": layers.keys() - large - {*merged}, "large": large - {*merged}, "merged": merged}
    return {what: sorted({str(layers[name].weight.dtype) for name in names}) for what, names in groups.items()}


def fp8_products(rank: int, world: int, dynamic_vram: bool) -> dict[str, bool]:
    """Of layers that a GPU multiplies in fp8, by the dtype in the file: are their products those of bfloat16?"""
    exact = {}
    for name in ("float32", ROUNDED):
        layer = comfy.ops.fp8_ops.Linear(256, 64, bias=False, dtype=torch.float32, device="cpu")
        dice = torch.Generator().manual_seed(0)
        layer.weight = torch.nn.Parameter(torch.randn(64, 256, generator=dice).to(getattr(torch, name)), False)
        if dynamic_vram:
            patcher.DynamicVram(torch.nn.Sequential(layer))
        layer.weight = torch.nn.Parameter(layer.weight.to(getattr(torch, ROUNDED)), False)
        x = torch.randn(3, 256, generator=dice).to(torch.bfloat16)
        expected = torch.nn.functional.linear(x, layer.weight.to(torch.bfloat16))
        exact[name] = torch.equal(layer.forward_comfy_cast_weights(x), expected)
    return exact


def merged(rank: int, world: int, folder: str, dynamic_vram: bool, quantised: str = "") -> dict[str, list[bool]]:
    """Of LoRAs on a large layer, one after the other: is it what ComfyUI's dynamic VRAM makes of it as it fetches it;
    and does the network's state dict have it as in the file, from which ComfyUI makes a Control-LoRA?"""
    model = loaded(folder, dynamic_vram=dynamic_vram, quantised=quantised)
    model.set_model_compute_dtype(torch.bfloat16)
    layer = "diffusion_model.double_blocks.0.img_mlp.0"
    view = model.file_views[f"{layer}.weight"]
    dice, each = torch.Generator().manual_seed(0), {"as fetched": [], "as in the file": []}
    for _ in range(2):
        model = model.clone()
        model.on_progress = lambda done: None
        up, down = (torch.randn(*shape, generator=dice) / 9 for shape in ((view.shape[0], 4), (4, view.shape[1])))
        lora = weight_adapter.LoRAAdapter(set(), (up, down, None, None, None, None))
        model.patches = {f"{layer}.{name}": [patch] for name, patch in {
            "weight": (0.7, lora, 1.0, None, None),
            "bias": (0.7, ("diff", (torch.randn(view.shape[0], generator=dice),)), 1.0, None, None),
        }.items()}  # fmt: skip
        model.patches_uuid = uuid.uuid4()
        model.partially_load(CPU)
        module = model.model.get_submodule(layer)
        ours, theirs = (
            [*inner(weight), bias] for weight, bias in ((module.weight, module.bias), as_fetched(model, layer))
        )
        each["as fetched"].append(all(map(torch.equal, ours, theirs)))
        with model.state_dict_of_file():
            state = model.model.diffusion_model.state_dict()
        each["as in the file"].append(state[f"{layer.partition('.')[2]}.weight"].data_ptr() == view.data_ptr())
    return each


def as_fetched(model: Any, layer: str) -> list[torch.Tensor]:
    """The weight and bias that ComfyUI's dynamic VRAM keeps after it has fetched this layer for the first time."""
    views = [model.file_views[f"{layer}.{name}"] for name in ("weight", "bias")]
    plain = [type(view) is torch.Tensor for view in views]
    dtype = getattr(torch, ROUNDED) if all(plain) else torch.bfloat16
    kept = [view.to(dtype) if is_plain else view for view, is_plain in zip(views, plain, strict=True)]
    fetched = torch.cat([
        torch.nn.functional.pad(part.flatten().view(torch.uint8), (0, aligned(part) - part.nbytes))
        for part in (part for tensor in kept for part in inner(tensor))
    ])  # fmt: skip
    module = SimpleNamespace(weight=kept[0], bias=kept[1], seed_key=layer)
    for name in ("weight", "bias"):
        patch = LowVramPatch(f"{layer}.{name}", model.patches)
        vars(module)[f"{name}_lowvram_function"] = patch
    geometry = comfy.memory_management.tensors_to_geometries(kept)
    module._prefetch = dict(
        signature="kept", resident=False, xfer_dest=fetched, needs_cast=False, cast_dest=None, cast_geometry=geometry
    )
    half = torch.bfloat16
    comfy.ops.resolve_cast_module_with_vbar(module, half, CPU, half, None, want_requant=False)
    return [module._v_weight, module._v_bias]


def inner(tensor: Any) -> list[torch.Tensor]:
    """The tensors that a quantised one consists of; a plain one itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def at_once(rank: int, world: int, path: str) -> dict[str, Any]:
    """Of a checkpoint that ComfyUI alone would load to a GPU at once: is it loaded, and what is as before after it?"""
    before, loaded = comfy.model_management.unet_inital_load_device, []
    comfy.model_management.unet_inital_load_device = on_a_gpu = lambda *_: torch.device("meta")
    of_class = type("Noted", (mapped.Mapped,), {"load": lambda self, *_, **__: loaded.append(self)})
    try:
        made = mapped.load_mapped(of_class, comfy.sd.load_checkpoint_guess_config, [path, False, False], 0)
        restored = comfy.model_management.unet_inital_load_device is on_a_gpu
    finally:
        comfy.model_management.unet_inital_load_device = before
    return {"views": len(made.file_views) > 0, "loaded": len(loaded), "restored": restored}


def compiled_by_a_patch(rank: int, world: int, path: str, layer: str) -> list[list[Any]]:
    """Of a MODEL without and one with a `layer` that torch has compiled, which ComfyUI has loaded: is its network
    split, is it compiled, and which object patches are sent?"""
    describing, patches = node_module("describe.model"), node_module("describe.model_patches")
    plain = comfy.sd.load_diffusion_model(path)
    asked = plain.clone()
    asked.add_object_patch(layer, torch.compile(asked.get_model_object(layer), backend="eager"))
    comfy.model_management.load_models_gpu([asked])
    made = []
    for model in (plain, asked):
        described = describing.describe_model(model, parallel.ParallelRequest())
        compiled = described.spec.compilation is not None
        made.append([described.architecture is not None, compiled, [*patches.without_compiled(model)]])
    comfy.model_management.unload_all_models()
    return made


def given_back(rank: int, world: int, folder: str, dynamic_vram: bool, other_patches: bool) -> dict[str, Any]:
    """What a MODEL with a patch on every weight has after it gave back a third of its bytes, and after the next load,
    also with `other_patches` by then; layers that were loaded again, and those that were given back."""
    first = loaded(folder, dynamic_vram=dynamic_vram)
    first.weight_state.on_move = lambda: moved.append(True)
    second, moved, again = first.clone(), [], []
    second.on_progress = lambda done: again.append(done)
    for clone, strength in ((first, 1.0), (second, 2.0 if other_patches else 1.0)):
        weights = {name: torch.ones(weight.shape) for name, weight in clone.model.named_parameters() if weight.ndim > 1}
        clone.add_patches({name: (value,) for name, value in weights.items()}, strength)
        clone.patches_uuid = uuid.UUID(int=int(strength))
    second.partially_load(CPU)
    wanted = {name: weight.clone() for name, weight in second.model.named_parameters()}
    second.unpatch_model(CPU)
    second.model.current_weight_patches_uuid = None
    first.partially_load(CPU)
    size, taken, before = first.loaded_size(), patcher.weight_bytes(first.model), dict(first.model.named_parameters())
    moved.clear()
    first.give_back(taken // 3)
    state, names = first.weight_state, dict(first.model.named_parameters())
    gone, counted = list(state.given_back), first.loaded_size()
    in_file = all(names[f"{name}.weight"].data_ptr() == first.file_views[f"{name}.weight"].data_ptr() for name in gone)
    again.clear()
    second.partially_load(CPU)
    after = dict(second.model.named_parameters())
    kept = [name for name, weight in after.items() if weight is before[name] and name.rpartition(".")[0] in gone]
    return {
        "moved": bool(moved), "counted": (size - counted) / taken, "in file": in_file, "layers": len(gone),
        "all layers": len({name.rpartition(".")[0] for name in after}), "loaded anew": len(again), "kept": kept,
        "back": second.loaded_size() == size and not state.given_back and not state.in_file_bytes,
        "other": [name for name, weight in after.items() if not torch.equal(weight.float(), wanted[name].float())],
    }  # fmt: skip


def layers_that_call_torchs(rank: int, world: int, folder: str, host: str) -> dict[str, bool]:
    """Of a MODEL whose file is narrower than its dtype, on a `host`: which layers call a method of torch's layer while
    a pack's code runs in place of it, and have its loaded weights the bits that they had before that?"""
    path = write(Path(folder), "flux_schnell")
    save_file({name: weight.half() for name, weight in load_file(path).items()}, path)
    spec = specs.ModelSpec(
        loader="comfy.sd:load_diffusion_model", arguments=json.dumps([str(path), {}]), weight_dtype="float32",
        dynamic_vram=host == "dynamic VRAM", force_cast=host == "a MODEL that casts", compute_dtype="float32",
    )  # fmt: skip
    model = comfy_model.load(additional.AdditionalModels(), spec, CPU, lambda done: None, None).clone(None, print)
    model.partially_load(CPU)
    layer, called = model.model.get_submodule("diffusion_model.double_blocks.0.img_mlp.0"), []
    before, forward = layer.weight, torch.nn.Linear.forward
    x = torch.randn(3, layer.in_features)
    want = layer(x)
    torch.nn.Linear.forward = lambda self, x: called.append(self) or forward(self, x)
    try:
        with model.casting_as_natively():
            got = layer(x)
    finally:
        torch.nn.Linear.forward = forward
    assert torch.equal(got, want)
    assert layer.weight is before
    return {"called": bool(called), "narrow": before.dtype is torch.half}
