"""What ranks send each other beside a network's forward: from rank 0, over gloo, the payload of a job; checks
that all machines have the same model files, and that what is sent arrives; and how fast this rank computes and sends
blocks, measured once, in a fraction of a second, when the group starts."""

import os
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..engine.comm.collectives import all_to_all, differing_ranks, ring_send_recv
from ..engine.comm.mesh import GroupState, MeshDim, comm_device_of, mesh_dim_of
from ..engine.comm.ranks import machine, machine_count, rank, world_size
from ..errors import ParallelError, Refused, say
from ..loading.fingerprint import check_unchanged, file_fingerprint
from ..specs import SourceFile
from ..wire.bundles import empty_bundle

PIECE_BYTES = 256 << 20


def payload(bundle: int | None) -> int:
    """Returns the descriptor of a request's bundle, of which rank 0 sends other machines a copy. Collective then."""
    if machine_count() == 1:
        assert bundle is not None
        return bundle
    size = torch.tensor(os.fstat(bundle).st_size if bundle is not None else 0)
    dist.broadcast(size, src=0)
    fd = empty_bundle(int(size)) if bundle is None else bundle
    is_copy = bundle is None  # rank 0's is sealed against writing
    memory: Tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=is_copy, size=int(size), dtype=torch.uint8)
    for piece in memory.split(PIECE_BYTES):
        dist.broadcast(piece, src=0)
    return fd


def check_files(files: Sequence[SourceFile]) -> None:
    """Raises Refused for the first file that has changed since it was described, or, on another machine than
    ComfyUI's, is missing or another file than there. Collective where there are several machines."""
    several = machine_count() > 1
    # By samples of the weights: files of one architecture may have equal names and sizes. Times may differ.
    found = [file_fingerprint(file.path) if several and os.path.isfile(file.path) else "" for file in files]
    # All of them before a refusal: one that refused would leave the other ranks waiting in the next comparison.
    differing = [differing_ranks(each) if several else [] for each in found]
    for file, other_ranks in zip(files, differing, strict=True):
        if several and not os.path.isfile(file.path):
            raise Refused("file.missing", path=file.path)
        if rank() in other_ranks:
            raise Refused("file.other", path=file.path)
        if machine() == 0:
            check_unchanged(file)


REPEATS = 3
CHECKED_NUMBERS = 1 << 18  # of each rank: 1 MiB, which NCCL sends as it sends large tensors
HEAD_SIZE = 128


def check_links(device: torch.device) -> None:
    """Compares what arrives from the previous rank of a ring, and from all ranks in an all-to-all, with what they sent.
    Collective. Raises ParallelError."""
    # A broken P2P would make wrong pictures without a word.
    if world_size() == 1:
        return
    assert dist.group.WORLD is not None
    world = mesh_dim_of(dist.group.WORLD, comm_device_of(device), GroupState())
    sent = torch.arange(CHECKED_NUMBERS * world.size, dtype=torch.int32, device=device)
    part = sent[world.index * CHECKED_NUMBERS :][:CHECKED_NUMBERS]
    before = (world.index - 1) % world.size
    received = torch.zeros_like(sent)
    ring_send_recv(sent + 7919 * world.index, received, world).wait()
    wrong = [] if torch.equal(received, sent + 7919 * before) else [before]
    all_to_all(sent + 7919 * world.index, received, None, None, world).wait()
    blocks = enumerate(received.chunk(world.size))
    wrong += [rank for rank, block in blocks if not torch.equal(block, part + 7919 * rank)]
    if wrong:
        raise ParallelError(say("start.corrupt", ranks=", ".join(map(str, sorted({*wrong})))))


def flops_per_second(device: torch.device) -> float:
    """Measures one matrix product in the precision that models use on this device."""
    size, dtype = (384, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    a = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best(lambda: a @ a, device)


def attention_flops_per_second(device: torch.device) -> float:
    """Measures PyTorch's attention in the same precision; its ratio to the matrix product differs between cards."""
    heads, tokens, dtype = (4, 512, torch.float32) if device.type == "cpu" else (24, 4096, torch.bfloat16)
    q = torch.ones(1, heads, tokens, HEAD_SIZE, device=device, dtype=dtype)
    return 4 * heads * tokens**2 * HEAD_SIZE / _best(lambda: F.scaled_dot_product_attention(q, q, q), device)


def bytes_per_second(mesh_dim: MeshDim, device: torch.device) -> float:
    """Measures a send to the next rank while the previous one's block arrives. Collective."""
    size = (1 << 20) if device.type == "cpu" else (64 << 20)
    block = torch.ones(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(block)
    dist.barrier()
    return size / _best(lambda: ring_send_recv(block, received, mesh_dim).wait(), device)


def host_bytes_per_second(device: torch.device) -> float:
    """Measures copies from main memory to the device, while all ranks that call this do the same."""
    cuda = device.type == "cuda"
    block = torch.ones((64 if cuda else 4) << 20, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(block, device=device)
    return block.nbytes / _best(lambda: target.copy_(block, non_blocking=True), device)


def _best(run: Callable[[], Tensor | list[Tensor]], device: torch.device) -> float:
    """Returns the seconds of the fastest of REPEATS runs, after one to warm up."""
    times = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return max(min(times[1:]), 1e-9)
