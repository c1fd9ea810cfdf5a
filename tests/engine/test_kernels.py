"""One device's part: blocks that merge to the whole, and kernels that this machine cannot run called as they want."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel_runtime.accelerators import FALLBACK, KERNELS
from parallel_runtime.engine.attention import dispatch, registry
from parallel_runtime.engine.attention.attention_override import backend_override
from parallel_runtime.engine.attention.context_attention import additive
from parallel_runtime.engine.attention.dispatch import AttentionKind, attend, attend_block, choose_kernel
from parallel_runtime.engine.attention.ring_and_ulysses import MAX_PENDING_BLOCKS, Merge
from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.request import BACKENDS, AttentionBackend

from .reference import attention, random_problem


def test_blocks_merge_to_the_whole_in_any_order() -> None:
    problem = random_problem(11, masked=False)
    tokens = problem.key.shape[1]
    cuts = [0, 1, tokens // 3, tokens]
    hidden = additive(torch.zeros(1, 1, 1, tokens, dtype=torch.bool), torch.float32)
    blocks = [
        attend_block(problem.query, problem.key[:, start:end], problem.value[:, start:end], None, None, "native")
        for start, end in pairwise(cuts)
    ]
    blocks.append(attend_block(problem.query, problem.key, problem.value, hidden, None, "native"))
    full = attention(problem)
    for order in permutations(blocks):
        merge = Merge(in_float32=True)
        for out, lse in order:
            merge.add(out.clone(), lse.clone())
        assert ((merge.result(problem.query, None) - full).abs().max() / full.std()) <= 1e-5


def test_the_log_sum_exp_of_a_block_is_that_of_its_scores() -> None:
    problem = random_problem(12, masked=False)
    q, k = problem.query.double().transpose(1, 2), problem.key.double().transpose(1, 2)
    expected = (q @ k.transpose(-1, -2) * 0.3).logsumexp(-1).transpose(1, 2).unsqueeze(-1)
    _, lse = attend_block(problem.query, problem.key, problem.value, None, 0.3, "native")
    assert (lse - expected).abs().max() <= 1e-4


def test_plain_attention_is_that_of_torch() -> None:
    problem = random_problem(13, masked=False)
    q, k, v = (tensor.transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert torch.equal(attend(problem.query, problem.key, problem.value, None, None, "native"), expected)


needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="NO CUDA: this PyTorch was built without it"
)


@needs_cuda_build
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_kernels_are_called_with_arguments_that_they_take(
    backend: AttentionBackend, dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float32 and backend not in ("auto", "native"):
        pytest.skip("half precision only")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(registry, "_imported", PACKAGES.get)
    with FakeTensorMode():
        query = torch.empty(70, 2, 12, 64, device="cuda", dtype=dtype).transpose(0, 1)
        key = torch.empty(37, 2, 12, 64, device="cuda", dtype=dtype).transpose(0, 1)
        mask = torch.ones(2, 1, 1, 37, device="cuda", dtype=torch.bool) if masked else None
        out, lse = attend_block(query, key, key, None if mask is None else additive(mask, dtype), None, backend)
        assert out.shape == query.shape
        assert lse.shape == (2, 70, 12, 1)
        assert lse.dtype == torch.float32
        assert attend(query, key, key, mask, None, backend).shape == query.shape


def _flash(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None, return_attn_probs: bool = False) -> Any:
    return _with_lse(q) if return_attn_probs else torch.empty_like(q)


def _sage(
    q: Tensor, k: Tensor, v: Tensor, *, tensor_layout: str, sm_scale: float | None, return_lse: bool = False
) -> Any:
    assert tensor_layout == "NHD"
    return _with_lse(q) if return_lse else torch.empty_like(q)


def _with_lse(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


# Packages that are not here, by what they take and return.
PACKAGES: dict[str, Any] = {
    "flash_attn": SimpleNamespace(flash_attn_func=_flash),
    "flash_attn_interface": SimpleNamespace(flash_attn_func=_flash),
    "sageattention": SimpleNamespace(sageattn=_sage),
}


def _chosen(query: Tensor, *, blocks: bool, recorded: bool = True) -> str:
    kind = AttentionKind(query.shape[3], query.dtype, blocks)
    return choose_kernel("auto", query, kind, MeshDim(), recorded)


@needs_cuda_build
@pytest.mark.parametrize(
    ("capability", "cudnn"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False), ((7, 5), False)],
)
def test_auto_takes_cudnn_where_pytorch_prefers_it(
    capability: tuple[int, int], cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        for blocks, other in ((True, "native"), (False, FALLBACK)):
            half = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
            assert _chosen(half, blocks=blocks) == ("_native_cudnn" if cudnn else other)
            assert _chosen(half.float(), blocks=blocks) == other
            assert _chosen(torch.empty(1, 8, 2, 320, device="cuda", dtype=torch.bfloat16), blocks=blocks) == other


@pytest.mark.parametrize(("backend", "asks"), [("sage", True), ("flash", True), ("native", False)])
def test_comfyui_attends_with_masks_that_a_chosen_kernel_does_not_take(backend: AttentionBackend, asks: bool) -> None:
    tokens, mask = torch.randn(1, 5, 2 * 8), torch.ones(1, 5, 5, dtype=torch.bool)
    asked = []

    def of_comfyui(q: Tensor, *_: Any, **options: Any) -> Tensor:
        asked.append(options)
        return q

    backend_override(backend)(of_comfyui, tokens, tokens, tokens, 2, mask=mask, skip_output_reshape=True)
    assert asked == ([{"mask": mask, "skip_reshape": False, "skip_output_reshape": True}] if asks else [])


EXPLICIT = list(KERNELS)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the log says of backends, from the start."""
    monkeypatch.setattr(dispatch, "_FAILURES", {})
    dispatch.warn_once.cache_clear()
    return caplog


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", EXPLICIT)
def test_where_a_chosen_backend_has_no_kernel_attention_is_that_of_native_and_the_log_names_it_once(
    backend: AttentionBackend, masked: bool, warnings: pytest.LogCaptureFixture
) -> None:
    problem = random_problem(15, masked=masked, grouped=True)
    mask = None if problem.mask is None else problem.mask.reshape(problem.mask.shape[0], -1, 1, problem.key.shape[1])
    mask = mask if mask is None or mask.shape[1] in (1, problem.query.shape[2]) else None
    given = problem.query, problem.key, problem.value
    bias = None if mask is None else additive(mask, torch.float32)
    for _ in range(2):
        assert torch.equal(attend(*given, mask, None, backend), attend(*given, mask, None, "native"))
        blocks = (attend_block(*given, bias, None, name) for name in (backend, "native"))
        for one, other in zip(*blocks, strict=True):
            assert torch.equal(one, other)
    assert len({record.getMessage() for record in warnings.records}) == len(warnings.records), "said once"
    assert all(f"attention_backend {backend} has no kernel" in record.getMessage() for record in warnings.records)
    assert warnings.records


@needs_cuda_build
@pytest.mark.parametrize(
    ("backend", "change", "says"),
    [
        ("flash", {"masked": True}, "it takes no mask"),
        ("_flash_3", {"dtype": torch.float32}, "it takes bfloat16 or float16, not float32"),
        ("sage", {"head_dim": 256}, "it takes heads of up to 128, not of 256"),
        ("_native_flash", {"head_dim": 264}, "it takes heads of up to 256, not of 264"),
        ("_native_cudnn", {"masked": True}, "PyTorch has none for a mask"),
        ("flash", {"head_dim": 72}, "FlashAttention has had enough of 72"),
        ("sage", {"head_dim": 72}, "Unsupported head_dim: 72"),
    ],
)
def test_a_call_that_a_kernel_does_not_take_goes_elsewhere_and_the_next_one_comes_back(
    backend: AttentionBackend,
    change: dict[str, Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(registry, "_imported", CHOOSY.get)
    taken: list[str] = []
    kernel = registry.FUNCTIONS[backend]

    def counted(*given: Any) -> Any:
        out = kernel.function(*given)
        taken.append(backend)
        return out

    monkeypatch.setitem(registry.FUNCTIONS, backend, replace(kernel, function=counted))
    with FakeTensorMode():
        for given, expected in ((change, 0), ({}, 1), (change, 1), ({}, 2)):
            assert _fake_attention(backend, **given)
            assert len(taken) == expected, given
    assert [says in record.getMessage() for record in warnings.records] == [True]


@needs_cuda_build
def test_a_kernel_for_some_sizes_of_heads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(registry, "_imported", CHOOSY.get)
    flash = registry.FUNCTIONS["flash"]
    limited = replace(flash, spec=replace(flash.spec, head_multiple=64))
    with FakeTensorMode():
        fits, other = (torch.empty(1, 8, 2, size, device="cuda", dtype=torch.bfloat16) for size in (64, 96))
        assert limited.unsupported_reason(fits, fits, fits, None) == ""
        assert limited.unsupported_reason(other, other, other, None) == "it takes heads of a multiple of 64, not of 96"


def _fake_attention(
    backend: AttentionBackend, *, masked: bool = False, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64
) -> bool:
    query = torch.empty(2, 9, 4, head_dim, device="cuda", dtype=dtype)
    mask = torch.ones(2, 1, 1, 9, device="cuda", dtype=torch.bool) if masked else None
    return attend(query, query, query, mask, None, backend).shape == query.shape


def _choosy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    if q.shape[-1] == 72:
        raise RuntimeError("FlashAttention has had enough of 72\nand of much else")
    return _flash(q, k, v, **options)


def _choosy_sage(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    if q.shape[-1] == 72:
        raise ValueError("Unsupported head_dim: 72")
    return _sage(q, k, v, **options)


CHOOSY: dict[str, Any] = {
    "flash_attn": SimpleNamespace(flash_attn_func=_choosy),
    "flash_attn_interface": SimpleNamespace(flash_attn_func=_choosy),
    "sageattention": SimpleNamespace(sageattn=_choosy_sage),
}


@needs_cuda_build
@pytest.mark.parametrize("fault", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_that_fails_is_no_kernel_that_is_not_there(
    fault: type[RuntimeError], monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise fault("of the device")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(registry, "_imported", {"flash_attn": SimpleNamespace(flash_attn_func=failing)}.get)
    with FakeTensorMode(), pytest.raises(fault, match="of the device"):
        _fake_attention("flash")
    assert not warnings.records


def test_a_package_that_is_not_here_is_named(warnings: pytest.LogCaptureFixture) -> None:
    registry._imported.cache_clear()
    assert "needs the package a_package_that_nobody_has" in registry.package_missing_reason("a_package_that_nobody_has")
    assert registry.package_missing_reason("math", "attention") == "math has no attention"
    assert registry.package_missing_reason("math", "sqrt") == ""


@pytest.mark.parametrize(("version", "records"), [(91002, False), (91499, False), (91500, True), (None, False)])
def test_cudnn_before_9_15_is_not_recorded(version: int | None, records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert registry.cudnn_supports_graphs() == records
    with FakeTensorMode():
        query = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        for blocks in (True, False):
            assert (_chosen(query, blocks=blocks) == "_native_cudnn") == records
            assert _chosen(query, blocks=blocks, recorded=False) == "_native_cudnn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, MAX_PENDING_BLOCKS, MAX_PENDING_BLOCKS + 3])
def test_many_blocks_merge_as_float64_would(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    outs = [torch.randn(2, 5, 3, 8, generator=generator).to(dtype) for _ in range(count)]
    lses = [9 * torch.randn(2, 5, 3, 1, generator=generator) for _ in range(count)]
    expected = sum(
        out.double() * weight for out, weight in zip(outs, torch.stack(lses).double().softmax(0), strict=True)
    )
    merge = Merge(in_float32=True)
    for out, lse in zip(outs, lses, strict=True):
        merge.add(out.clone(), lse)
    merged = merge.result(outs[0], None)
    assert merged.dtype == dtype
    # In half precision the only rounding is that of the result.
    assert torch.allclose(merged.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
