"""A FLUX transformer of diffusers' with random weights, on one rank and over all ranks: how far the outputs differ.

    torchrun --nproc-per-node 2 -m parallel_runtime.for_diffusers.example

Runs on a CPU too, and downloads nothing."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel

from . import Parallelism, attach, detach

IMAGE, TEXT, CHANNELS, WIDTH = 67, 13, 16, 32  # odd sizes: tokens need not divide by anything
log = logging.getLogger(__name__)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(0)  # every rank makes the same weights and inputs, as it would load the same file
    network: Any = FluxTransformer2DModel(
        in_channels=CHANNELS, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    transformer = network.to(device)
    inputs = {
        "hidden_states": torch.randn(1, IMAGE, CHANNELS),
        "encoder_hidden_states": torch.randn(1, TEXT, WIDTH),
        "pooled_projections": torch.randn(1, WIDTH),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(IMAGE, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    with torch.no_grad():
        reference = transformer(**inputs, return_dict=False)[0]
        attach(transformer, None, Parallelism(ring_degree=dist.get_world_size()))
        parallel = transformer(**inputs, return_dict=False)[0]
        detach(transformer)
    if dist.get_rank() == 0:
        difference = float((parallel - reference).abs().max() / reference.std())
        log.info("%d ranks, largest difference %.1e standard deviations", dist.get_world_size(), difference)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
