"""What our nodes ask of ComfyUI's process and the workers of its code, in ways that users can cause."""

from __future__ import annotations

import logging
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..zoo import tiny
from .comfy import OUR_ROOT
from .pack import node_module, pack_module

import comfy.clip_vision  # isort: skip  # the pack's module has made ComfyUI importable
import comfy.hooks  # isort: skip
import comfy.lora  # isort: skip
import comfy.model_base  # isort: skip
import comfy.ops  # isort: skip
import comfy.quant_ops  # isort: skip
import comfy.samplers  # isort: skip
import folder_paths  # isort: skip
from comfy.model_patcher import ModelPatcher  # isort: skip
from comfy_extras.nodes_hypernetwork import load_hypernetwork_patch  # isort: skip
from comfy_extras.nodes_tomesd import TomePatchModel  # isort: skip

code, workers = (node_module(name) for name in ("describe.model_files", "describe.host"))
specs, errors = pack_module("parallel_runtime.specs"), pack_module("parallel_runtime.errors")
architecture_of = pack_module("parallel_runtime.architectures").architecture_of
network_stats = pack_module("parallel_runtime.planning.network_stats")
messages = pack_module("parallel_runtime.wire.messages")
codec, packs = pack_module("parallel_runtime.loading.object_codec"), pack_module("parallel_runtime.loading.code_names")
COUNTING = """
def counting():
    steps = 0
    def count():
        nonlocal steps
        steps += 1
        return steps
    return count
"""


def made_again(rank: int, world: int, **changed: str) -> str:
    """A function of ComfyUI's that another one makes, after the words for it were `changed`; or the refusal."""
    function = comfy.samplers.ksampler("dpm_fast").sampler_function
    described = codec.Describer().describe(function, "the sampler") | changed
    try:
        made = codec.Rebuilder({})(described)
    except errors.Refused as refused:
        return str(refused)
    assert made.__code__ is function.__code__
    return "made"


def drawn(rank: int, world: int) -> dict[str, list[bool]]:
    """Of random generators in a pack's list: does one draw in the worker what it would draw here, and then here what
    comes after that? torch's own is the worker's own."""
    draws: dict[str, Callable[[Any], Any]] = {
        "Python's": lambda dice: dice.random(), "torch's": lambda dice: torch.rand(3, generator=dice).tolist()
    }  # fmt: skip
    equal = {}
    for name, draw in draws.items():
        dice, again = (random.Random(5) if name == "Python's" else torch.Generator().manual_seed(5) for _ in range(2))
        here = code.describer()
        there = codec.Rebuilder(here.tensors)
        (made,) = there(here.describe([dice], "a pack's list", of_pack=True))
        drawn = [draw(made)]
        changes, _ = there.changes()
        here.take_back(changes)
        equal[name] = [one == draw(again) for one in (*drawn, draw(dice))]
    own = code.describer()
    (made,) = codec.Rebuilder(own.tensors)(own.describe([torch.default_generator], "a pack's list", of_pack=True))
    return {**equal, "torch's own": [made is torch.default_generator]}


def counted(rank: int, world: int) -> list[int]:
    """What a pack's function counts in a variable of the function around it: twice in the worker, and then here."""
    folder = Path(tempfile.mkdtemp())
    folder_paths.add_model_folder_path("custom_nodes", str(folder))
    (folder / "counting.py").write_text(COUNTING)
    os.utime(folder / "counting.py", (packs.STARTED - 60,) * 2)
    name = packs.import_pack(f"counting.py@{packs.pack_fingerprint(str(folder / 'counting.py'))}")
    count, here = sys.modules[name].counting(), code.describer()
    there = codec.Rebuilder(here.tensors)
    made = there(here.describe(count, "the MODEL"))
    there_counted = [made(), made()]
    here.take_back(there.changes()[0])
    return [*there_counted, count()]


def tokens_merged_after_a_run(rank: int, world: int) -> bool:
    """Whether the patches of TomePatchModel, described after they have run, do in a worker what they do here."""
    model = ModelPatcher(torch.nn.Identity(), load_device=torch.device("cpu"), offload_device=torch.device("cpu"))
    patches = TomePatchModel.execute(model, 0.5).result[0].model_options["transformer_options"]["patches"]
    kinds, tokens = ("attn1_patch", "attn1_output_patch"), torch.arange(128.0).sin().reshape(1, 16, 8)

    def merged(patches: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(3)
        query, *_ = patches["attn1_patch"][0](tokens, None, None, {"original_shape": (1, 4, 4, 4)})
        assert query.shape[1] < 16
        return patches["attn1_output_patch"][0](query, {})

    patched, describer = merged(patches), codec.Describer()
    again = codec.rebuild(describer.described({kind: describer.describe(patches[kind], kind) for kind in kinds}))
    return torch.equal(merged(again), patched)


def what_clip_vision_saw(rank: int, world: int) -> list[Any]:
    """The sizes of the pictures that a vision encoder of ComfyUI's saw, as a worker has them."""
    layers = {"num_hidden_layers": 2, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8}
    picture = {"image_size": 28, "patch_size": 14, "num_channels": 3, "projection_dim": 8}
    config = {"model_type": "clip_vision_model", "hidden_act": "gelu", "layer_norm_eps": 1e-5, **layers, **picture}
    seen = comfy.clip_vision.ClipVisionModel(config).encode_image(torch.zeros(2, 30, 40, 3))
    describer = codec.Describer()
    described = describer.described({"seen": describer.describe(seen, "the CONDITIONING")})
    return codec.rebuild(described)["seen"].image_sizes


def made_inside_of_a_function(rank: int, world: int) -> str:
    """The refusal of a class of ComfyUI's that is in no module."""
    sampling = comfy.model_base.model_sampling(SimpleNamespace(sampling_settings={}), comfy.model_base.ModelType.EPS)
    return _refusal_of(type(sampling), "the model sampling")


def hypernetwork_of_no_file(rank: int, world: int) -> str:
    """The refusal of a patch of HypernetworkLoader that was made before its loader noted files."""
    path = os.path.join(tempfile.mkdtemp(), "hypernetwork.pt")
    layers = {"linear.weight": torch.randn(4, 4), "linear.bias": torch.zeros(4)}
    torch.save({4: [layers, layers]}, path)
    return _refusal_of(load_hypernetwork_patch(path, 1.0), "attn1_patch")


def _refusal_of(value: Any, what: str) -> str:
    try:
        code.describer().describe(value, what)
    except errors.Refused as refused:
        return str(refused)
    return ""


def packs_imported(rank: int, world: int) -> dict[str, str]:
    """Why a worker does not import a pack, "" where it does: one that is there, with other files, that is not there,
    outside of the folder, that fails, and whose file has changed since the process began."""
    folder, seconds = Path(tempfile.mkdtemp()), packs.STARTED - 60
    folder_paths.add_model_folder_path("custom_nodes", str(folder))
    (folder / "there").mkdir()
    for name, source in ("there/__init__.py", "VALUE = 3"), ("failing.py", "raise SystemExit(3)"), ("new.py", ""):
        (folder / name).write_text(source)
        os.utime(folder / name, (seconds, seconds))
    known = {name: packs.pack_fingerprint(str(folder / name)) for name in ("there", "failing.py")}
    os.utime(folder / "new.py", (packs.STARTED + 60, packs.STARTED + 60))
    asked = {
        "there": f"there@{known['there']}",
        "other": "there@0123456789ab",
        "missing": "nowhere@0123456789ab",
        "outside": f"../{folder.name}/there@{known['there']}",
        "failing": f"failing.py@{known['failing.py']}",
        "new": "new.py@0123456789ab",
    }
    return {what: _why_not_imported(pack) for what, pack in asked.items()}


def packs_of_two_machines(rank: int, world: int, another: dict[str, str]) -> str:
    """What ComfyUI's process says of a pack whose files are, on the machine of rank 1, `another`; None removes one."""
    files, seconds = (
        {"__init__.py": "from . import nodes", "nodes.py": "VALUE = 0", "lib/same.py": ""},
        packs.STARTED - 60,
    )
    hosts, own = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    for folder, contents in (hosts, files), (own, files | (another if rank == 1 else {})):
        for name, source in contents.items():
            if source is not None:
                (folder / "there" / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / "there" / name).write_text(source)
                os.utime(folder / "there" / name, (seconds, seconds))
    folder_paths.add_model_folder_path("custom_nodes", str(own), is_default=True)
    path = str(hosts / "there")
    pack = f"there@{packs.pack_fingerprint(path)}"
    try:
        packs.import_pack(pack, packs.pack_files(path))
    except errors.Refused as refused:
        return str(messages.Refusal.of(refused).raised(f"10.0.0.{rank + 1}"))
    return ""


def _why_not_imported(pack: str) -> str:
    try:
        packs.import_pack(pack)
    except errors.Refused as refused:
        return str(refused)
    return ""


def folder_after_a_pack_has_gone_elsewhere(rank: int, world: int) -> list[str]:
    """The one that workers are started in, before and after."""
    folder, before = os.getcwd(), workers.comfy_setup().folder
    os.chdir("/")
    try:
        return [before, workers.comfy_setup().folder]
    finally:
        os.chdir(folder)


def merged_by_workers(rank: int, world: int, layout: str) -> bool:
    """Whether workers merge the bits that ComfyUI does where the second model has ComfyUI's mixed precision, with a
    weight of this quantized `layout` or a plain one."""
    layer = comfy.ops.mixed_precision_ops({}, torch.bfloat16).Linear(32, 32, bias=False, dtype=torch.bfloat16)
    weight, own = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    if layout:
        weight = comfy.quant_ops.QuantizedTensor.from_float(weight, layout, scale="recalculate")
    patch = (0.7, [(weight, layer.convert_weight)], 0.3, None, None)
    describer = codec.Describer()
    again = codec.rebuild(describer.described({"merge": describer.describe(patch, "the merge")}))["merge"]
    merged, by_workers = (comfy.lora.calculate_weight([each], own.float(), "weight") for each in (patch, again))
    return torch.equal(by_workers, merged) and not torch.equal(merged, own.float())


def too_large(rank: int, world: int, what: str) -> str:
    """Why a merge, two MODELs of a guider, each with a merge, or a hook with a model as LoRA, of 22 GiB are refused
    before workers start."""
    weights = {f"w{index}": torch.zeros(1, dtype=torch.bfloat16).expand(1 << 27) for index in range(88)}
    try:
        if what == "two MODELs":
            halves = (
                {name: weights[name] for name in [*weights][::2]},
                {name: weights[name] for name in [*weights][1::2]},
            )
            own, other = (
                replace(_described("FLUX"), weight_patches=pack_module("parallel_runtime.jobs").Described({}, half))
                for half in halves
            )
            own.with_partner(other)
        if what == "hook":
            hooks = comfy.hooks.create_hook_model_as_lora(weights, None, 0.5, 0.0)
            node_module("describe.sampling_job").describe_conds({"positive": [{"hooks": hooks}]}, code.describer())
        model, cpu = torch.nn.Module(), torch.device("cpu")
        for name, weight in weights.items():
            model.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        patcher = ModelPatcher(model, cpu, cpu)
        patcher.add_patches(patcher.get_key_patches(), 0.3, 0.7)
        node_module("describe.model").describe_weight_patches(patcher, node_module("describe.model_files").describer())
    except errors.Refused as refused:
        return f"{refused.code}: {refused}"
    return ""


def couples_frames(rank: int, world: int, name: str) -> list[bool]:
    """Whether the images of a UNet's batch may not be shared out, and whether neither images nor prompts may."""
    network = tiny.make(name)
    known = architecture_of(network)
    return [known.images_coupled(network), node_module("describe.model_patches").network_couples_batch(network, {})]


def guided_by(rank: int, world: int, guides: list[dict[str, Any]] | None) -> tuple[bool, str]:
    """Whether a network is split in a run with these guides of LTX-2, and the name that a refusal says."""
    stats = _described("LTX-2").guided_by({"positive": [{}], "negative": [{"guide_attention_entries": guides}]}).stats
    return stats.divisible, stats.name


def hooked(rank: int, world: int) -> list[bool]:
    """Whether workers have a MODEL as with dynamic VRAM, by its prompts: without hooks, with a LoRA's, with those of a
    ControlNet."""
    control = SimpleNamespace(get_extra_hooks=lambda: [object()])
    conds = ({}, {"hooks": object()}, {"control": control})
    each = (_described("FLUX").guided_by({"positive": [{}], "negative": [cond]}) for cond in conds)
    return [described.spec.dynamic_vram for described in each]


def help_pages(rank: int, world: int) -> dict[str, bool]:
    """The page of the troubleshooting for each kind of loss, and whether there is one of this name."""
    status_of, events = pack_module("parallel_runtime.group.activity"), node_module("routes")
    kinds = ("killed", "exited", "torchrun", "gone", "silent", "raised", "out_of_memory")
    losses = (status_of.Loss(rank=0, kind=kind) for kind in kinds)
    pages = [events.help_page(status_of.Status(state="died", loss=loss)) for loss in losses]
    return {page: (OUR_ROOT / "docs" / "troubleshooting" / f"{page}.md").is_file() for page in pages}


def gguf_with_a_dtype(rank: int, world: int) -> str:
    """Why CP Load Diffusion Model does not load a .gguf file with this weight_dtype."""
    loader = node_module("classes.cp_loaders")
    try:
        loader.load_for_workers("any.gguf", "fp8_e5m2")
    except errors.Refused as refused:
        return str(refused)
    return ""


def planned_with_boxes(rank: int, world: int) -> list[bool]:
    """Whether the images of a batch stay together in a plan without and with a GLIGEN model in a prompt, where CP Plan
    makes the inputs of the MODEL that has none."""
    described, cpu = _described("SD1.5"), torch.device("cpu")
    gligen = ModelPatcher(torch.nn.Linear(2, 2), cpu, cpu)
    works = (
        described.with_models_of({"positive": [cond]}).work((4, 4, 8, 8), 0)
        for cond in ({}, {"gligen": ("position", gligen, [])})
    )
    request = pack_module("parallel_runtime.request").ParallelRequest()
    return [described.inputs(request, work).network.images_coupled for work in works]


def _described(name: str) -> Any:
    stats = network_stats.NetworkStats(name=name, heads=4, layers=2, width=64, weights=1, weight_bytes=4, item_bytes=4)
    spec = pack_module("parallel_runtime.specs").ModelSpec(loader=name, dynamic_vram=True)
    made = {
        "spec": spec,
        "weight_patches": {},
        "architecture": None,
        "batch_coupled": False,
        "runs_changed_code": False,
    }
    return node_module("describe.model").DescribedModel(network=torch.nn.Identity(), stats=stats, **made)


def logged(rank: int, world: int) -> dict[str, bool]:
    """Whether ComfyUI's log has the traceback of a refusal, of a crash while one was handled, of the reverse, and of a
    worker's death."""
    acts = {"refused": _refuse, "crashed": _crash, "refused after": _refuse_after, "died": _die}
    return {name: _is_logged(act) for name, act in acts.items()}


def _refuse() -> None:
    raise errors.Refused("the degrees do not fit")


def _die() -> None:
    raise errors.WorkerDied("worker rank 1 was killed")


def _crash() -> None:
    try:
        _refuse()
    except errors.Refused:
        {}["a bug while it is handled"]


def _refuse_after() -> None:
    try:
        {}["no such widget"]
    except KeyError:
        _refuse()


def _is_logged(act: Any) -> bool:
    try:
        act()
    except (errors.ParallelError, KeyError):  # where ComfyUI logs it
        return bool(pack_module("nodes")._is_needed(logging.makeLogRecord({"msg": traceback.format_exc()})))
    raise AssertionError("nothing was raised")
