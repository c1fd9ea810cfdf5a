"""A small trained model and what goes with it. Its folder is also one of ComfyUI's for diffusion models."""

from pathlib import Path

MODEL = Path(__file__).parent / "models" / "cp_demo_flux.safetensors"
HEADS = 2
