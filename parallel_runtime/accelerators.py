"""Kinds of devices, and what differs between them: who passes tensors, what the launch sets, which kernels give a
log-sum-exp. What is not here goes through torch.accelerator. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .specs import AttentionBackend


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """`kind` is torch's device type.

    `collectives` is the backend of torch.distributed between such devices. `environment` is that of the launch, where
    {interface} stands for the network interface. `kernels` are those with a log-sum-exp for half precision that "auto"
    may take for a ring's blocks, without a mask, the likely fastest first; none: there is one that runs everywhere.
    `whole` are those that race with ComfyUI's own attention where keys are whole.
    """

    kind: str
    collectives: str
    environment: Mapping[str, str] = field(default_factory=dict)
    kernels: tuple[AttentionBackend, ...] = ()
    whole: tuple[AttentionBackend, ...] = ()


# ROCm's devices are torch's "cuda" too, and RCCL goes by NCCL's name; cuDNN is NVIDIA's alone.
CUDA = Accelerator(
    kind="cuda",
    collectives="nccl",
    environment={
        "NCCL_SOCKET_IFNAME": "={interface}",  # without the sign every name that begins so would do
        # Attention fills a GPU: transfers that wait for a free place in it would begin when it is over.
        "TORCH_NCCL_HIGH_PRIORITY": "1",
    },
    kernels=("_native_cudnn", "_native_flash"),
    whole=("_native_cudnn", "_native_flash", "flash", "_flash_3"),
)
XPU = Accelerator(kind="xpu", collectives="xccl", environment={"CCL_KVS_IFACE": "{interface}"})
NPU = Accelerator(kind="npu", collectives="hccl", environment={"HCCL_SOCKET_IFNAME": "={interface}"})
ACCELERATORS = {each.kind: each for each in (CUDA, XPU, NPU)}


def collectives_of(kind: str) -> str:
    """torch.distributed's backends for ranks that compute on devices of this kind, one each: CPU tensors go too."""
    found = ACCELERATORS.get(kind)
    return f"cpu:gloo,{kind}:{found.collectives}" if found else "cpu:gloo"


def environment(interface: str) -> dict[str, str]:
    """Of the launch, for whichever devices there are."""
    return {
        name: value.format(interface=interface)
        for each in ACCELERATORS.values()
        for name, value in each.environment.items()
    }
