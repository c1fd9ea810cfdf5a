"""A small trained model and what goes with it."""

import importlib.util
import sys
from pathlib import Path

from ..errors import Refused
from ..specs import DEMO, ModelSpec, SourceFile

MODEL = Path(__file__).parent / "models" / "cp_demo_flux.safetensors"
HEADS = 2
REQUIREMENTS = Path(__file__).parents[1] / "for_diffusers" / "requirements.txt"


def spec() -> ModelSpec:
    stat = MODEL.stat()
    return ModelSpec(loader=DEMO, files=(SourceFile(path=str(MODEL), size=stat.st_size, mtime_ns=stat.st_mtime_ns),))


def check_diffusers() -> None:
    """Raises Refused, with the command to run, where that of which the demo's network is made is not installed."""
    if importlib.util.find_spec("diffusers") is None:
        raise Refused("demo.packages", python=sys.executable, requirements=str(REQUIREMENTS))
