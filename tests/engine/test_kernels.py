"""One device's part: blocks that merge to the whole, and kernels that this machine cannot run called as they want."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any, get_args

import pytest
import torch
from diffusers.models import attention_dispatch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel_runtime.specs import AttentionBackend
from parallel_runtime.worker.engine.kernels import attend, attend_block, candidates
from parallel_runtime.worker.engine.merge import Merge
from parallel_runtime.worker.engine.overriding import by_backend

from .reference import attention, random_problem


def test_blocks_merge_to_the_whole_in_any_order() -> None:
    problem = random_problem(11, masked=False)
    tokens = problem.key.shape[1]
    cuts = [0, 1, tokens // 3, tokens]
    hidden = torch.zeros(1, 1, 1, tokens, dtype=torch.bool)
    blocks = [
        attend_block(problem.query, problem.key[:, start:end], problem.value[:, start:end], None, None, "auto")
        for start, end in pairwise(cuts)
    ]
    blocks.append(attend_block(problem.query, problem.key, problem.value, hidden, None, "auto"))
    whole = attention(problem)
    for order in permutations(blocks):
        merge = Merge(in_float32=True)
        for out, lse in order:
            merge.add(out.clone(), lse.clone())
        assert ((merge.result(problem.query, None) - whole).abs().max() / whole.std()) <= 1e-5


def test_the_log_sum_exp_of_a_block_is_that_of_its_scores() -> None:
    problem = random_problem(12, masked=False)
    q, k = problem.query.double().transpose(1, 2), problem.key.double().transpose(1, 2)
    expected = (q @ k.transpose(-1, -2) * 0.3).logsumexp(-1).transpose(1, 2).unsqueeze(-1)
    _, lse = attend_block(problem.query, problem.key, problem.value, None, 0.3, "auto")
    assert (lse - expected).abs().max() <= 1e-4


def test_plain_attention_is_that_of_torch() -> None:
    problem = random_problem(13, masked=False)
    q, k, v = (tensor.transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert torch.equal(attend(problem.query, problem.key, problem.value, None, None, "auto"), expected)


needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="NO CUDA: this PyTorch was built without it"
)


@needs_cuda_build
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", get_args(AttentionBackend))
def test_cuda_kernels_are_called_with_arguments_that_they_take(
    backend: AttentionBackend, dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float32 and backend not in ("auto", "native"):
        pytest.skip("half precision only")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for name, stand_in in PACKAGES.items():
        monkeypatch.setattr(attention_dispatch, name, stand_in, raising=False)
    with FakeTensorMode():
        query = torch.empty(70, 2, 12, 64, device="cuda", dtype=dtype).transpose(0, 1)
        key = torch.empty(37, 2, 12, 64, device="cuda", dtype=dtype).transpose(0, 1)
        mask = torch.ones(2, 1, 1, 37, device="cuda", dtype=torch.bool) if masked else None
        out, lse = attend_block(query, key, key, mask, None, backend)
        assert out.shape == query.shape
        assert lse.shape == (2, 70, 12, 1)
        assert lse.dtype == torch.float32


def _flash_attn_3(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _flash_attn_2(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*_flash_attn_3(q), q.new_empty(0), q.new_empty(2))


# What the packages that are not here return, by the names that diffusers calls them.
PACKAGES: dict[str, Any] = {
    "_wrapped_flash_attn_forward": _flash_attn_2,
    "_wrapped_flash_attn_3": lambda q, **_: (torch.empty_like(q), _flash_attn_3(q)[1].permute(0, 2, 1)),
    "sageattn": lambda q, k, v, **_: _flash_attn_3(q),
}


@needs_cuda_build
@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), ["_native_flash"]), ((8, 9), ["_native_flash"]), ((9, 0), ["_native_cudnn", "_native_flash"]),
     ((10, 0), ["_native_cudnn", "_native_flash"]), ((12, 0), ["_native_flash"]), ((7, 5), ["native"])],
)  # fmt: skip
def test_auto_lets_cudnn_race_where_pytorch_prefers_it(
    capability: tuple[int, int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        assert candidates(torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)) == expected
        assert candidates(torch.empty(1, 8, 2, 64, device="cuda")) == ["native"]


@pytest.mark.parametrize(("backend", "asks"), [("sage", True), ("flash", True), ("native", False)])
def test_comfyui_attends_with_masks_that_a_chosen_kernel_does_not_take(backend: AttentionBackend, asks: bool) -> None:
    tokens, mask = torch.randn(1, 5, 2 * 8), torch.ones(1, 5, 5, dtype=torch.bool)
    asked = []

    def of_comfyui(q: Tensor, *_: Any, **options: Any) -> Tensor:
        asked.append(options)
        return q

    by_backend(backend)(of_comfyui, tokens, tokens, tokens, 2, mask=mask, skip_output_reshape=True)
    assert asked == ([{"mask": mask, "skip_reshape": False, "skip_output_reshape": True}] if asks else [])
