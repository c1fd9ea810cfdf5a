"""A GPU that is not there: networks of fake "cuda" tensors in a group of ranks that are not there either.

What mixes devices fails by itself; what waits for the device (reads a number from it, copies to main memory) fails
here. Any network can be run: `on_fake_cuda` moves it, `Launches` watches a call of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NEEDS_CUDA_BUILD = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="NO CUDA: this PyTorch was built without it"
)
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
          "_reshape_alias", "to.dtype", "to.device", "contiguous", "lift_fresh")  # fmt: skip


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
    with pytest.MonkeyPatch.context() as patched, FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        patched.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        yield


def on_fake_cuda(network: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Inside `fake_cuda`: the same network with no memory, on "cuda"."""
    for module in network.modules():
        held: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors in held:
            for name, tensor in list(tensors.items()):
                if tensor is None:
                    continue
                kept = tensor.dtype if not tensor.is_floating_point() else dtype
                made = torch.empty(tensor.shape, dtype=kept, device="cuda")
                tensors[name] = nn.Parameter(made, requires_grad=False) if tensors is module._parameters else made
    return network


class Launches(TorchDispatchMode):
    """Counts what runs on the device, views left out, and fails where the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        on_cuda = any(tensor.device.type == "cuda" for tensor in given)
        assert not (on_cuda and name.startswith(_WAITING)), f"{name} waits for the device"
        out = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        assert not (on_cuda and any(tensor.device.type == "cpu" for tensor in made)), f"{name} copies to main memory"
        if on_cuda and not name.startswith(("prim.", *(f"aten.{view}" for view in _VIEWS))):
            self.counts[name.removeprefix("aten.").removeprefix("c10d.").partition(".")[0]] += 1
        return out
