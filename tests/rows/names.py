"""The zoo's names and classes, known without ComfyUI."""

from __future__ import annotations

from parallel_runtime.architectures.autoencoders import COMPARED

NAMES = [
    "SD AutoencoderKL", "FLUX, SD3", "FLUX.2", "HunyuanImage 2.1", "HunyuanImage refiner", "Wan 2.1, Qwen-Image",
    "Wan 2.2", "HunyuanVideo", "HunyuanVideo 1.5", "LTX 0.9", "LTX 0.9, reflecting", "LTX 0.9.1, noise",
    "LTX 0.9.5, timestep", "Cosmos 1", "Mochi", "CogVideoX", "SVD", "SeedVR2", "SeedVR2, slicing", "MiniMax H3",
    "TAESD", "TAESD of FLUX.2", "TAEHV", "TAEHV of Wan 2.2", "TAEHV of HunyuanVideo 1.5", "TAEHV of LTX-2",
]  # fmt: skip
ROWS, COLUMNS = -2, -1
KINDS = set(COMPARED)
