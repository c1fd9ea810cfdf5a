"""A small trained model and what goes with it. Its folder is also one of ComfyUI's for diffusion models."""

from pathlib import Path

from ..specs import DEMO, ModelSpec, SourceFile

MODEL = Path(__file__).parent / "models" / "cp_demo_flux.safetensors"
HEADS = 2


def spec() -> ModelSpec:
    stat = MODEL.stat()
    return ModelSpec(loader=DEMO, files=(SourceFile(path=str(MODEL), size=stat.st_size, mtime_ns=stat.st_mtime_ns),))
