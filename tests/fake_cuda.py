"""A GPU that is not there: networks of fake "cuda" tensors in a group of ranks that are not there either.

What mixes devices fails by itself; what waits for the device (reads a number from it, copies to main memory) fails
here. Any network can be run: `on_fake_cuda` moves it, `Launches` watches a call of it.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OF_PYTORCH = re.compile(r"/torch/|/einops/|/contextlib\.py")
_WAITING = (
    "aten._local_scalar_dense",
    "aten.item",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.equal",
    "aten.masked_select",
)
_VIEWS = ("view", "transpose", "narrow", "split", "slice", "permute", "select", "unsqueeze", "squeeze", "expand",
          "as_strided", "alias", "detach", "empty", "zeros", "_unsafe_view", "t.default", "unbind", "reshape",
          "_reshape_alias", "to.dtype", "to.device", "contiguous", "lift_fresh", "flatten", "chunk")  # fmt: skip


@contextmanager
def fake_group(world: int, rank: int = 0) -> Iterator[None]:
    """A group of which this process is one rank, and nobody is another."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    card = patch.object(torch.cuda, "get_device_capability", lambda *_: capability)
    with card, FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        yield


def on_fake_cuda(network: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> nn.Module:
    """Inside `fake_cuda`: the same network with no memory, on "cuda". `dtype` None: each tensor's own."""
    for module in network.modules():
        vars(module)["_apply"] = partial(_stay, module)  # a network that moves a part of itself: it is there
        dicts: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in dicts:
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                made = torch.empty(tensor.shape, dtype=kept, device="cuda")
                tensors[name] = nn.Parameter(made, requires_grad=False) if tensors is module._parameters else made
    return network


def _stay(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


class Launches(TorchDispatchMode):
    """Counts what runs on the device, views left out, and fails where the host waits for it.

    Where `may_wait` says so, who waits is noted in `waits`, and reads a 1.
    """

    def __init__(self, may_wait: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._may_wait = may_wait

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        on_cuda = any(tensor.device.type == "cuda" for tensor in given)
        if on_cuda and name.startswith(_WAITING):
            assert self._may_wait(), f"{name} waits for the device"
            return self._waited(name, given[0])
        out = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if on_cuda and any(tensor.device.type == "cpu" for tensor in made):
            assert self._may_wait(), f"{name} copies to main memory"
            self._waited(name, given[0])
        if on_cuda and not name.startswith(("prim.", *(f"aten.{view}" for view in _VIEWS))):
            self.counts[name.removeprefix("aten.").removeprefix("c10d.").partition(".")[0]] += 1
        return out

    def _waited(self, name: str, tensor: Tensor) -> Any:
        self.waits[_who()] += 1
        if tensor.dtype == torch.bool or "is_nonzero" in name:
            return True
        if "nonzero" in name:
            return torch.zeros(1, tensor.ndim, dtype=torch.int64, device=tensor.device)
        return 1.0 if tensor.is_floating_point() else 1


def _who() -> str:
    """The line outside of PyTorch that made the host wait."""
    frames = [frame for frame in traceback.extract_stack()[:-3] if not _OF_PYTORCH.search(frame.filename)]
    return f"{Path(frames[-1].filename).name}: {frames[-1].line}"
