"""The table of devices, with devices that are not there: names, collectives, environment, kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel_runtime import accelerators
from parallel_runtime.accelerators import ACCELERATORS, KERNELS, Accelerator, AttentionKernel, distributed_backends
from parallel_runtime.errors import Refused
from parallel_runtime.group.machines import checked_plan
from parallel_runtime.group.torchrun import Rendezvous, environment
from parallel_runtime.planning.candidates import default_plan
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.run_plan import PlanInputs
from parallel_runtime.request import EngineOptions, ParallelRequest, widgets

choice = pytest.importorskip("parallel_runtime.engine.attention.dispatch")
kernels = pytest.importorskip("parallel_runtime.engine.attention.dispatch")
registry = pytest.importorskip("parallel_runtime.engine.attention.registry")
mesh = pytest.importorskip("parallel_runtime.engine.comm.mesh")
masks = pytest.importorskip("parallel_runtime.engine.attention.context_attention")

from .engine.reference import attention, random_problem  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "collectives"),
    [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("npu", "cpu:gloo,npu:hccl"), ("cpu", "cpu:gloo")],
)
def test_each_kind_has_its_collectives_and_tensors_of_the_cpu_go_by_gloo(kind: str, collectives: str) -> None:
    assert distributed_backends(kind) == collectives


@pytest.mark.parametrize("kind", list(ACCELERATORS))
def test_devices_are_named_by_their_kind(kind: str) -> None:
    for devices in ("", "0,1", f"{kind}:0,{kind}:1"):
        placement = default_plan(
            PlanInputs(request=ParallelRequest(devices=devices), network=NetworkStats(heads=24), gpus=2, kind=kind)
        ).placement
        assert placement.devices == (f"{kind}:0", f"{kind}:1")


@pytest.mark.parametrize("kind", ["xpu", "npu"])
def test_kernels_of_cuda_are_refused_elsewhere_by_name(kind: str) -> None:
    request = ParallelRequest.of({"attention_backend": "flash"})
    with pytest.raises(ValueError, match=f"flash needs CUDA GPUs, and the workers run on {kind}:0; choose auto"):
        default_plan(PlanInputs(request=request, network=NetworkStats(heads=24), gpus=2, kind=kind))


def test_a_new_row_of_the_table_is_all_that_the_launch_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Accelerator(kind="other", collectives="occl", environment={"OCCL_INTERFACE": "<{interface}>"})
    monkeypatch.setitem(accelerators.ACCELERATORS, "other", other)
    assert environment(2, "token", "/folder", Rendezvous(store="/folder/store"))["OCCL_INTERFACE"] == "<lo>"
    assert distributed_backends("other") == "cpu:gloo,other:occl"


@pytest.mark.parametrize(("masked", "grouped"), [(False, False), (True, False), (False, True)])
def test_where_no_kernel_gives_a_log_sum_exp_products_do(masked: bool, grouped: bool) -> None:
    problem = random_problem(14, masked=masked, grouped=grouped)
    mask = None if problem.mask is None else problem.mask.reshape(problem.mask.shape[0], 1, 1, -1)
    bias = None if mask is None else masks.additive(mask, torch.float32)
    heads = problem.query.shape[2]
    key, value = (kernels.repeat_kv(tensor, heads) for tensor in (problem.key, problem.value))
    out, lse = kernels._by_matmul(problem.query, key, value, bias, None)
    same, same_lse = kernels.attend_block(problem.query, problem.key, problem.value, bias, None, "native")
    assert (out - attention(problem)).abs().max() <= 1e-5
    assert (out - same).abs().max() <= 1e-5
    assert (lse - same_lse).abs().max() <= 1e-4


def test_on_a_device_without_such_a_kernel_a_block_stays_there() -> None:
    with FakeTensorMode():
        query = torch.empty(1, 2100, 4, 64, device="xpu", dtype=torch.bfloat16)
        key = torch.empty(1, 70, 2, 64, device="xpu", dtype=torch.bfloat16)
        kind = choice.AttentionKind(64, torch.bfloat16, blocks=True)
        assert choice.choose_kernel("auto", query, kind, mesh.MeshDim(size=2)) == "native"
        out, lse = kernels.attend_block(query, key, key, None, None, "native")
        assert (out.shape, out.dtype, out.device.type) == (query.shape, query.dtype, "xpu")
        assert (lse.shape, lse.dtype) == ((1, 2100, 4, 1), torch.float32)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="NO CUDA: this PyTorch was built without it")
def test_rocm_has_no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with FakeTensorMode():
        query = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        kind = choice.AttentionKind(64, torch.bfloat16, blocks=True)
        assert choice.choose_kernel("auto", query, kind, mesh.MeshDim()) == "native", "PyTorch's flash"


def test_every_kernel_of_the_table_has_its_functions_and_an_option_and_is_in_the_help() -> None:
    assert list(registry.FUNCTIONS) == list(KERNELS)
    (widget,) = (widget for widget in widgets() if widget.name == "attention_backend")
    assert widget.options == ("auto", "native", *KERNELS)
    help_page = (Path(__file__).parents[1] / "docs" / "parallel-config.md").read_text(encoding="utf-8")
    for kernel in KERNELS.values():
        assert registry.FUNCTIONS[kernel.name].spec is kernel
        assert f"`{kernel.name}`" in help_page


@pytest.mark.parametrize(
    ("version", "enough"), [(None, True), ("2.1.0", False), ("2.1.1+cu128", True), ("2.2", True), ("1.0.6", False)]
)
def test_a_ring_has_no_kernel_of_a_package_that_is_too_old(
    version: str | None, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "version_of", lambda _: version)
    monkeypatch.setattr(AttentionKernel, "installed", True)
    assert accelerators.ring_backend("attention_sage") == ("sage" if enough else "")
    assert accelerators.ring_backend("attention_split") == ""
    assert accelerators.ring_backend("attention_pytorch") == "auto"


def test_a_function_like_flash_attn_func_has_no_mask() -> None:
    with pytest.raises(ValueError, match="has no mask"):
        AttentionKernel(name="mine", function="flash_attn_func", masks=True)


def test_a_new_row_of_kernels_is_an_option_is_refused_by_its_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = AttentionKernel(name="mine", devices=("xpu",), package="nobody_has_it")
    monkeypatch.setitem(KERNELS, "mine", spec)
    request = ParallelRequest(options=EngineOptions(attention_backend="mine"))
    with pytest.raises(Refused, match="mine needs XPU GPUs, and the workers run on cuda:0"):
        checked_plan(PlanInputs(request=request, network=NetworkStats(heads=24), gpus=2, kind="cuda"))
    with pytest.raises(Refused, match="needs the package nobody_has_it"):
        checked_plan(PlanInputs(request=request, network=NetworkStats(heads=24), gpus=2, kind="xpu"))
    query = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    kernel = registry.KernelFunction(spec=spec, function=lambda q, *_: (q, None))
    assert kernel.unsupported_reason(query, query, query, None) == "it needs a XPU GPU, and the tensors are on cpu"
    masked = kernel.unsupported_reason(query, query, query, query, with_lse=True)
    assert masked == "it gives no log-sum-exp with a mask"
