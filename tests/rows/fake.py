"""A rank's share of a real VAE on fake tensors: no memory, no compute, nothing sent. In ComfyUI's python:
`python -m tests.rows.fake COMFYUI NAME METHOD RANKS...` prints a line of JSON for each number of ranks.

The fake is at the wire: what would be sent is counted instead (collectives._start). FLOPs of convolutions and live
tensors are counted; workspaces of kernels and the FLOPs of attention are not.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

CAP = 128 << 20  # ComfyUI's own limit for LTX's chunks of time, on cards from 24 GB


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive, and their peak; those that were there before do not count."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._seen: set[int] = set()
        self._now = 0
        self.peak = 0
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or key in self._seen:
            return
        self.kernels += 1  # it made memory, so it is a kernel and no view
        size = storage.nbytes()
        self._seen.add(key)
        weakref.finalize(storage, self._gone, key, size)
        self._now += size
        self.peak = max(self.peak, self._now)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size


def measure(name: str, method: str, ranks: int, latent: tuple[int, ...] = ()) -> dict[str, Any]:
    """Of a middle rank."""
    from parallel_runtime.architectures.autoencoders import COMPARED, kind_of
    from parallel_runtime.engine.comm import collectives
    from parallel_runtime.engine.comm.mesh import MeshDim
    from parallel_runtime.engine.rows.conversion import Conversion, share_of
    from parallel_runtime.worker.comfy_loop.autoencoder import made_divisible, uniform_chunk_bytes

    from .real import REAL

    real, sent = REAL[name], []

    def count(tensors: Mapping[int, Tensor], *_: Any) -> list[Any]:
        sent.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
        return []

    collectives._start = count
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        torch.set_default_dtype(torch.bfloat16)
        model = real.make().eval()
        if ranks > 1:
            made_divisible(model)
        torch.set_default_dtype(torch.float32)
        x = torch.empty(_shape(real, method, latent), dtype=torch.bfloat16)
        unit = 1 if method == "decode" else real.ratio
        share = share_of(x, unit, MeshDim(size=ranks, index=min(1, ranks - 1), ranks=tuple(range(ranks))))
        mine = share.split(x).clone()
        live, flops = Live([*model.parameters(), *model.buffers(), x, mine]), FlopCounterMode(display=False)
        gc.disable()
        chunked = partial(uniform_chunk_bytes, COMPARED[kind_of(model)].chunk_size, CAP)
        with live, flops:
            made = Conversion(model, method, x.device, chunked).run(x, share)
        gc.enable()
    return {
        "ranks": ranks, "peak": live.peak, "flops": flops.get_total_flops(), "kernels": live.kernels,
        "exchanges": len(sent), "sent": sum(sent), "made": list(made.shape), "side": share.dim,
        "kind": kind_of(model), "latent": list(latent or real.latent),
    }  # fmt: skip


def _shape(real: Any, method: str, latent: tuple[int, ...]) -> tuple[int, ...]:
    shape = latent or real.latent
    if method == "decode":
        return shape
    return (shape[0], 3, *((real.frames,) if len(shape) == 5 else ()), *(side * real.ratio for side in shape[-2:]))


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    name, method, *numbers = sys.argv[2:]
    sys.argv[1:] = ["--cpu", "--use-pytorch-cross-attention"]  # as a GPU attends
    import comfy.options

    comfy.options.enable_args_parsing()
    for number in numbers:
        print(json.dumps(measure(name, method, int(number))), flush=True)
