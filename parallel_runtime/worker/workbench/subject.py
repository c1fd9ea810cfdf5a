"""The network that somebody works on: a file of theirs with `network()` and `inputs(rows=0, text=0)`."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Subject:
    """`more_rows` is the same call with a larger latent, `more_text` with a longer prompt."""

    network: nn.Module
    call: dict[str, Any]
    more_rows: dict[str, Any]
    more_text: dict[str, Any]


def load_subject(path: Path, comfyui: Path) -> Subject:
    """Runs the file at `path`, with ComfyUI importable and set to the CPU and float32."""
    if not path.is_file():
        raise SystemExit(f"{path} is no file; write one as networks/README.md shows")
    sys.path.append(str(comfyui.resolve()))
    sys.argv = ["main.py", "--cpu", "--force-fp32", "--use-pytorch-cross-attention"]
    spec = importlib.util.spec_from_file_location("subject", path)
    assert spec is not None
    assert spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    torch.manual_seed(1)
    network = randomized(made.network())
    return Subject(network, *(_seeded(made, **more) for more in ({}, {"rows": 2}, {"text": 3})))


def randomized(network: nn.Module) -> nn.Module:
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape) / max(parameter[0].numel() if parameter.ndim > 1 else 100, 1) ** 0.5
        around = 1.0 if parameter.ndim < 2 and name.endswith(("weight", "scale")) else 0.0
        parameter.data = (noise + around).to(parameter.dtype)
    return network.eval().requires_grad_(False)


def run(network: nn.Module, call: dict[str, Any]) -> list[Tensor]:
    with torch.inference_mode():
        out = network(**{name: _copied(value) for name, value in call.items()}, transformer_options={})
    return [out] if isinstance(out, Tensor) else list(out)


def _seeded(made: Any, **more: int) -> dict[str, Any]:
    torch.manual_seed(2)
    call: dict[str, Any] = made.inputs(**more)
    return call


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_copied(item) for item in value])
    return value.clone() if isinstance(value, Tensor) else value
