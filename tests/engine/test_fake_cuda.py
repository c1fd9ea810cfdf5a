"""On fake "cuda" tensors: no device is mixed up, nobody waits for the device, and launches are few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.comm.mesh import ContextMesh, build_mesh
from parallel_runtime.engine.split.streams import Streams
from parallel_runtime.for_diffusers import attach, detach
from parallel_runtime.specs import Parallelism

from ..fake_cuda import Launches, fake_cuda, fake_group, on_fake_cuda
from .tiny import build, inputs

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="NO CUDA: this PyTorch was built without it")

DEGREES = [(4, 1), (1, 4), (2, 2)]
LENGTHS = {"text": 77, "image": 201}
# Those of diffusers' transformers that read nothing from the device themselves before their blocks.
KINDS = ["flux", "wan", "ltx", "sd3_dual", "ltx2"]


@pytest.mark.parametrize("mask", [None, "keys", "pairs"])
@pytest.mark.parametrize("key_heads", [24, 8, 3])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("rank", [0, 3])
def test_an_attention_stays_on_the_device(
    rank: int, degrees: tuple[int, int], key_heads: int, mask: str | None
) -> None:
    with fake_group(4, rank):
        mesh = build_mesh(_degrees(degrees), torch.device("cuda", 0))
        with fake_cuda(), Launches():
            attend_together, query, key = _attention(mesh, degrees, key_heads)
            total = sum(LENGTHS.values())
            shapes = {"keys": (1, query.shape[1]), "pairs": (1, 1, total, total)}
            given = None if mask is None else torch.ones(shapes[mask], dtype=torch.bool, device="cuda")
            out = attend_together(query, key, key, given)
            assert (out.shape, out.dtype, out.device) == (query.shape, torch.bfloat16, query.device)


def _attention(
    mesh: ContextMesh, degrees: tuple[int, int], key_heads: int = 24, **options: Any
) -> tuple[ContextAttention, Tensor, Tensor]:
    streams = Streams(mesh.context)
    for name, length in LENGTHS.items():
        streams.record_length(name, length, name)
    attend_together = ContextAttention(mesh, _degrees(degrees, **options), streams, tuple(LENGTHS), tuple(LENGTHS))
    own = streams.local_tokens(tuple(LENGTHS)).size
    query, key = (torch.empty(1, own, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (24, key_heads))
    return attend_together, query, key


class FromMainMemory(TorchDispatchMode):
    """Fails where a tensor of the CPU goes to the device: a CUDA graph could not be made of that."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given, made = (
            [x.device.type for x in tree_leaves(xs) if isinstance(x, Tensor)] for xs in ((args, kwargs), out)
        )
        assert not ("cpu" in given and "cuda" in made), function
        return out


@pytest.mark.parametrize("mask", [None, "keys", "pairs"])
@pytest.mark.parametrize("method", ["alltoall", "allgather"])
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_nothing_in_an_attention_comes_from_main_memory(
    degrees: tuple[int, int], method: str, mask: str | None
) -> None:
    with fake_group(4, 1):
        options = _degrees(degrees, rotate_method=method)
        mesh = build_mesh(options, torch.device("cuda", 0))
        with fake_cuda(), FromMainMemory():
            attend_together, query, key = _attention(mesh, degrees, rotate_method=method)
            total = sum(LENGTHS.values())
            shapes = {"keys": (1, query.shape[1]), "pairs": (1, 1, total, total)}
            given = None if mask is None else torch.ones(shapes[mask], dtype=torch.bool, device="cuda")
            attend_together(query, key, key, given)


def _launches(degrees: tuple[int, int], **options: Any) -> dict[str, int]:
    """Of the second layer: what the first one found out is known."""
    with fake_group(degrees[0] * degrees[1]):
        mesh = build_mesh(_degrees(degrees), torch.device("cuda", 0))
        with fake_cuda():
            attend_together, query, key = _attention(mesh, degrees, **options)
            attend_together(query, key, key)
            with Launches() as launches:
                attend_together(query, key, key)
    return dict(launches.counts)


def test_ulysses_is_one_exchange_in_and_one_out() -> None:
    launches = _launches((1, 8))
    assert launches.pop("alltoall_base_") == 2
    # Packing, the kernel, heads into place: one more where tokens are uneven.
    assert sum(launches.values()) <= 5, launches


def test_a_ring_sends_one_message_a_hop() -> None:
    launches = _launches((8, 1))
    assert (launches.pop("send"), launches.pop("recv_")) == (7, 7)
    assert launches.pop("_scaled_dot_product_cudnn_attention") == 8
    assert launches.pop("addcmul") + launches.pop("addcmul_") == 7
    assert launches.pop("mul") == 1, "each block's output is read once, as it is, and nothing is copied to float32"
    assert sum(launches.values()) <= 3, launches  # packing, and what each block weighs


def test_a_ring_that_collects_attends_to_two_blocks() -> None:
    launches = _launches((8, 1), rotate_method="allgather")
    assert (launches.pop("send"), launches.pop("recv_")) == (7, 7)
    assert launches.pop("_scaled_dot_product_cudnn_attention") == 2
    assert (launches.pop("mul"), launches.pop("addcmul")) == (1, 1), "one merge"
    assert sum(launches.values()) <= 3, launches  # packing, and what each block weighs


@pytest.mark.parametrize("kind", KINDS)
def test_a_transformer_stays_on_the_device(kind: str) -> None:
    with fake_group(4):
        meshes = {d: build_mesh(_degrees(d), torch.device("cuda", 0)) for d in DEGREES}
        transformer, made = build(kind), inputs(kind)
        with fake_cuda():
            network: Any = on_fake_cuda(transformer)
            given = {name: _moved(value) for name, value in made.items()}
            for degrees, mesh in meshes.items():
                attach(network, mesh, _degrees(degrees))
                with Launches():
                    out = network(**given, return_dict=False)[0]
                detach(network)
                assert out.device.type == "cuda"


def _degrees(degrees: tuple[int, int], **options: Any) -> Parallelism:
    return Parallelism(ring_degree=degrees[0], ulysses_degree=degrees[1]).with_options(**options)


def _moved(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=torch.bfloat16 if value.is_floating_point() else value.dtype, device="cuda")
