"""What our nodes do with networks and nodes of ComfyUIs after v0.33, imitated, in ComfyUI's python."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .pack import node_module, pack_module

import comfy.model_prefetch  # isort: skip  # the pack's module has made ComfyUI importable
from comfy.model_patcher import ModelPatcher  # isort: skip

from ..zoo import fun_control_like, later, sparse_like  # isort: skip
from ..zoo.calls import CASES  # isort: skip
from .control_scenes import tiny_vae  # isort: skip

remote, describer = node_module("remote.remote_model"), node_module("describe.model_files")
patches = node_module("describe.model_patches")
block_patches = pack_module("parallel_runtime.architectures.block_patches")
codec = pack_module("parallel_runtime.loading.object_codec")
code_names = pack_module("parallel_runtime.loading.code_names")
files = node_module("describe.model_files")
additional_models = pack_module("parallel_runtime.worker.comfy_loop.additional_models")


def outer_methods(rank: int, world: int) -> list[list[str]]:
    """The methods of SenseNova that are asked of workers, each with its arguments, where nothing is computed here."""
    asked: list[list[str]] = []

    def evaluation(method: str, arguments: dict[str, Any]) -> tuple[list[torch.Tensor], ...]:
        asked.append([method, *arguments])
        return [torch.zeros(1)], [torch.zeros(1)]

    remote.check_network = lambda *_: None  # the imitation's code is no file of ComfyUI's
    network = remote.remote_network(later.sensenova(), evaluation)
    network.preprocess_prefix(torch.zeros(1, 5, dtype=torch.long))
    network(torch.zeros(1, 3, 32, 32), torch.zeros(1), text_input_ids=torch.zeros(1, 5))
    return asked


def malloc_graph(rank: int, world: int) -> list[str]:
    """What happens while a network whose forward records its allocations is evaluated by workers."""
    seen: list[str] = []

    @contextmanager
    def pause() -> Iterator[None]:
        seen.append("paused")
        yield
        seen.append("recording")

    def evaluation(method: str, arguments: dict[str, Any]) -> torch.Tensor:
        seen.append("evaluated")
        return torch.zeros(1)

    remote.check_network = lambda *_: None
    comfy.model_prefetch.pause_malloc_graph = pause
    try:
        remote.remote_network(later.sensenova(), evaluation)(torch.zeros(1, 3, 32, 32), torch.zeros(1))
    finally:
        del comfy.model_prefetch.pause_malloc_graph
    remote.remote_network(later.sensenova(), evaluation)(torch.zeros(1, 3, 32, 32), torch.zeros(1))
    return seen


def kept_keys_of_another_run(rank: int, world: int) -> list[Any]:
    """What is left of Qwen-Image 2.1's kept keys as a run begins, whether the next ones are kept, and whether its
    forwards are recorded meanwhile."""
    comfy_model = pack_module("parallel_runtime.worker.comfy_loop.comfy_model")
    network: Any = later.qwen_image21(cached=True)
    network.prefix_cache = {0: "keys"}
    model = SimpleNamespace(network=network, partner=None)
    comfy_model.ComfyModel.clear_kv_cache(model)
    return [network.prefix_cache, network.prefix_cache_enabled]


def sparse_options(rank: int, world: int, of_blocks: bool, previous: str) -> dict[str, Any]:
    """What Model Sparse Attention puts on a MODEL, as workers make it again: whether a forward with it has the same
    bits, keeps its state for itself, and leaves the network divided; `previous`: a node's override before it."""
    network = later.minimax_h3(False) if of_blocks else CASES["wan"].network()
    holder = torch.nn.Module()
    holder.diffusion_model = network
    cpu = torch.device("cpu")
    model = ModelPatcher(holder, cpu, cpu)
    options = sparse_like.options_for(network)
    if previous:
        del options["optimized_attention_override"]
        options["optimized_attention_override"] = {"foreign": lambda func, *args, **more: func(*args, **more)}[previous]
        module = sparse_like.installed()
        module.install_override(module.SparseAttnPatch(), options)
    override = options["optimized_attention_override"]
    model.model_options["transformer_options"] = options
    found = {"each head": block_patches.attends_each_head(override)}
    if previous:
        return found
    patches.check_network_patches(model)
    parts = describer.describer(model=model)
    tree = parts.describe(options, "a model option")
    made = codec.Rebuilder(parts.tensors, patcher=model)(tree)
    given: Any = {"x": torch.randn(23, later.WIDTH)} if of_blocks else CASES["wan"].inputs()
    with torch.inference_mode():
        one, other, dense = (network(**given, transformer_options=dict(each)) for each in (options, made, {}))
    own = made["optimized_attention_override"].__closure__
    state = next(cell.cell_contents for cell in own if hasattr(cell.cell_contents, "installed"))
    request = SimpleNamespace(options=SimpleNamespace(attention_backend="auto"))
    return found | {
        "same": bool(torch.equal(one, other)),
        "sparse": not torch.equal(one, dense),
        "anew": state.installed == set() and state.vsa_plans == {},
        "undivided": parts.names_network,
        "no ring": patches.without_lse(model, request),
    }


def fun_control_options(rank: int, world: int) -> dict[str, Any]:
    """What MiniMax H3's Fun ControlNet puts on a MODEL, as workers make it again: are the wrapper and the blocks of one
    object, with the VAE and the file that were described; and is a forward with it the same to the bit?"""
    os.environ["WORLD_SIZE"] = str(world)
    network, cpu = later.minimax_h3(False), torch.device("cpu")
    file, vae = ModelPatcher(fun_control_like.fun_control(), cpu, cpu), tiny_vae()
    files._files[file.model] = files.stat_file(__file__)
    options: dict[str, Any] = {}
    fun_control_like.install(code_names.module_named("comfy_extras.nodes_minimax_h3"))
    count = 3 * 5
    video = torch.rand(1, 3, 24, 40, generator=torch.Generator().manual_seed(2))  # of so many latent pixels
    fun_control_like.MiniMaxH3FunControlPatch(file, vae, video, 0.7).register(options)
    parts = describer.describer()
    around = parts.describe(options["wrappers"]["diffusion_model"][None], "a wrapper")
    blocks = parts.describe(options["patches_replace"], "a model option")
    models = additional_models.AdditionalModels()
    with models.of_job("a network") as load_one:
        made_by = {"model_patch": lambda _: file, "vae": load_one}
        make = codec.Rebuilder(parts.tensors, lambda described: made_by[described["kind"]](described))
        wrappers, replaced = make(around), make(blocks)
    made = {"wrappers": {"diffusion_model": {None: wrappers}}, "patches_replace": replaced}
    given = torch.randn(2 + count + (2 + count) // 2, later.WIDTH)
    with torch.inference_mode():
        one, other, plain = (network(given, transformer_options=dict(each)) for each in (options, made, {}))
    patch = wrappers[0].__self__
    return {
        "one object": all(block.control_patch is patch for block in replaced["dit"].values()),
        "vae": type(patch.vae).__name__,
        "counted": parts.vaes == [vae],
        "same": bool(torch.equal(one, other)),
        "does something": not torch.equal(one, plain),
    }


def figures(rank: int, world: int) -> dict[str, list[Any]]:
    """What planning knows of the networks: heads, layers, width, and an attention that a ring cannot have."""
    model = node_module("describe.model")
    architecture_of = pack_module("parallel_runtime.architectures").architecture_of
    networks = {"qwen": later.qwen_image21(), "sensenova": later.sensenova(), "ming": later.ming()}
    stats = {name: model.network_stats_of(one, architecture_of(one), 1, 2) for name, one in networks.items()}
    return {name: [one.heads, one.layers, one.width, one.no_lse] for name, one in stats.items()}
