"""What our nodes do with networks and nodes of ComfyUIs after v0.33, imitated, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from .pack import node_module, pack_module

import comfy.model_prefetch  # isort: skip  # the pack's module has made ComfyUI importable

from ..zoo import later  # isort: skip

remote = node_module("remote.remote_model")
jobs = pack_module("parallel_runtime.jobs")


def outer_methods(rank: int, world: int) -> list[list[str]]:
    """The methods of SenseNova that are asked of workers, each with its arguments, where nothing is computed here."""
    asked: list[list[str]] = []

    def evaluation(method: str, arguments: dict[str, Any]) -> tuple[list[torch.Tensor], ...]:
        asked.append([method, *arguments])
        return [torch.zeros(1)], [torch.zeros(1)]

    remote.check_network = remote.check_module = lambda *_: None  # the imitation's code is no file of ComfyUI's
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

    remote.check_network = remote.check_module = lambda *_: None
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
