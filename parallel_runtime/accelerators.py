"""Two tables: accelerators (torch device types, with their collective backend and environment) and attention kernels.
Memory, streams and graphs of CUDA are asked by torch.cuda, the rest by torch.accelerator. Imports no torch."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec


@dataclass(frozen=True, kw_only=True)
class Transport:
    """One way for the devices of a machine to exchange tensors: by their own backend with these variables in its
    `environment`, or by gloo `through_main_memory`. `log_line` says what it is and what would be faster."""

    environment: Mapping[str, str] = field(default_factory=dict)
    through_main_memory: bool = False
    log_line: str = ""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """`kind` is torch's device type.

    `collectives` is the torch.distributed backend between such devices. `environment` holds variables that the launch
    sets, where {interface} stands for the network interface. `slower_transports` are tried one after another where the
    devices cannot exchange tensors as the backend itself chooses."""

    kind: str
    collectives: str
    environment: Mapping[str, str]
    slower_transports: tuple[Transport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """A half-precision attention kernel.

    `name` is diffusers' name (the package's, if diffusers has none) and an option of the widget attention_backend. It
    needs `package`, by its import name, in `min_version` or newer (of the distribution of that name); "" for kernels of
    PyTorch itself. `function` of that package is called like flash_attn_func, with softmax_scale and
    return_attn_probs=True, and returns (output, log-sum-exp [B, heads, queries] of the scaled scores to base e, ...); a
    kernel with "" has its own function in engine/attention/registry.py.

    It runs on these kinds of `devices` (torch's: "cuda" is AMD's too), with heads of up to `max_head_dim`, multiples of
    `head_multiple`, and takes a mask where `masks` is set; without one it also returns the log-sum-exp, as a ring
    needs. `cudnn` marks a kernel of cuDNN: ROCm has none, and some versions must not be in a CUDA graph.
    `low_precision` marks one that not every attention of a network tolerates. `comfyui` is the name of ComfyUI's
    attention function that calls it: where a user chose that function, a ring's blocks have this kernel.

    `auto_on` are the (major) compute capabilities on which "auto" takes it, for a ring's blocks and for full keys: on
    them it was the fastest in every measurement (tests/bench/RESULTS.md, "Kernels"). Elsewhere full keys have ComfyUI's
    own attention, and blocks PyTorch's flash."""

    name: str
    package: str = ""
    min_version: str = ""
    function: str = ""
    devices: tuple[str, ...] = ("cuda",)
    max_head_dim: int = 256
    head_multiple: int = 1
    masks: bool = False
    cudnn: bool = False
    low_precision: bool = False
    comfyui: str = ""
    auto_on: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.function and self.masks:
            raise ValueError(f"{self.name}: a function that takes what flash_attn_func takes has no mask")

    @property
    def installed(self) -> bool:
        """Whether its package is installed; nothing is imported."""
        return not self.package or find_spec(self.package) is not None

    @property
    def new_enough(self) -> bool:
        """Whether the installed package is of `min_version` or newer, or does not say."""
        versions = (version_of(self.package) or "").partition("+")[0], self.min_version
        found, needed = ([int(part) for part in each.split(".") if part.isdigit()] for each in versions)
        return not found or found >= needed


# ROCm's devices are torch's "cuda" too, and RCCL goes by NCCL's name; cuDNN is NVIDIA's alone.
CUDA = Accelerator(
    kind="cuda",
    collectives="nccl",
    environment={
        "NCCL_SOCKET_IFNAME": "={interface}",  # without the sign every name that begins so would do
        # Attention fills a GPU: transfers that wait for a free place in it would begin when it is over.
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        # A graph's buffers would be mapped by the other ranks: dropped graphs may then keep their memory, and replays
        # hung elsewhere. Without it each message is copied once more. `report` measures both.
        "NCCL_GRAPH_REGISTER": "0",
        # A ring, Ulysses and sharded weights have communicators of their own, whose kernels lie on parallel branches of
        # a graph: in a different order on each rank they would deadlock. With this NCCL 2.26 and later keep the
        # program's order. One head chunk instead of two would do so for the first two only, and hide fewer transfers.
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
        # Multicast over NVSwitch takes 268 MB a communicator and gains nothing for what we send, and NCCL ends where a
        # container has no right to it.
        "NCCL_NVLS_ENABLE": "0",
    },
    slower_transports=(
        Transport(
            environment={"NCCL_P2P_DISABLE": "1"},
            log_line="the GPUs cannot exchange tensors directly (NCCL's P2P), and do so through shared memory. Where "
            "they should: update the driver, and switch off IOMMU or ACS in the BIOS. NCCL_P2P_DISABLE=1 in ComfyUI's "
            "environment starts the workers like this at once",
        ),
        Transport(
            environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
            log_line="the GPUs cannot exchange tensors directly or through shared memory, and do so through sockets, "
            "which is slow. In Docker give the container --shm-size=1g. NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 in "
            "ComfyUI's environment start the workers like this at once",
        ),
        Transport(
            through_main_memory=True,
            log_line="NCCL does not work between the GPUs, which exchange tensors through main memory, by gloo: very "
            "slow. See docs/troubleshooting/gpus-do-not-connect.md",
        ),
    ),
)
XPU = Accelerator(kind="xpu", collectives="xccl", environment={"CCL_KVS_IFACE": "{interface}"})
NPU = Accelerator(kind="npu", collectives="hccl", environment={"HCCL_SOCKET_IFNAME": "={interface}"})
ACCELERATORS = {each.kind: each for each in (CUDA, XPU, NPU)}
# A new row stands above those that are slower: `auto_on` has the compute capabilities on which that was measured
# (tests/bench/RESULTS.md). It also wants a line in docs/parallel-config.md, and a row of PACKAGES in
# tests/engine/test_kernels.py.
KERNELS = {  # auto takes the first one that it can
    each.name: each
    for each in (
        # H100, H200, B200: 0.35 ms to flash's 0.56 for FLUX in halves, 39 to 59 for Wan at 480p.
        AttentionKernel(name="_native_cudnn", head_multiple=8, masks=True, cudnn=True, auto_on=(9, 10)),
        AttentionKernel(name="_native_flash", head_multiple=8),
        AttentionKernel(
            name="flash", package="flash_attn", min_version="2.6.3", function="flash_attn_func",
            comfyui="attention_flash",
        ),
        AttentionKernel(name="_flash_3", package="flash_attn_interface", function="flash_attn_func"),
        AttentionKernel(
            name="sage", package="sageattention", min_version="2.1.1", max_head_dim=128, low_precision=True,
            comfyui="attention_sage",
        ),
    )
}  # fmt: skip


ANY_EXACT = ("attention_pytorch", "attention_xformers")  # ComfyUI's functions where nobody chose: other kernels may do
FALLBACK = "fallback"  # in a kernel's place: the attention that computes where none is chosen, ComfyUI's own


def ring_backend(function: str) -> str:
    """Returns the backend of a ring that computes what ComfyUI's attention function of this name does; "" for none."""
    if function in ANY_EXACT:
        return "auto"
    of_it = (spec for spec in KERNELS.values() if function and spec.comfyui == function)
    return next((spec.name for spec in of_it if spec.installed and spec.new_enough), "")


def version_of(package: str) -> str | None:
    """Returns the version of the installed distribution of this name, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def distributed_backends(kind: str) -> str:
    """Returns the backend string of torch.distributed for ranks on this kind of device, with gloo for CPU tensors."""
    accelerator = ACCELERATORS.get(kind)
    return f"cpu:gloo,{kind}:{accelerator.collectives}" if accelerator else "cpu:gloo"


def environment(interface: str) -> dict[str, str]:
    """Returns the environment variables of a launch, for every kind of accelerator."""
    variables = (pair for each in ACCELERATORS.values() for pair in each.environment.items())
    return {name: value.format(interface=interface) for name, value in variables}
