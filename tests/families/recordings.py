"""Calls of ComfyUI's own networks, recorded once a session in ComfyUI's python, for ours to answer."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ..comfyui.comfy import ComfyInstall
from ..tiny import TINY, Tiny, write

HERE = Path(__file__).parent
OVERRIDE = HERE.parent / "comfyui" / "rig_nodes" / "tiny_override.py"
DTYPES = ("float32", "bfloat16")
PATCH_ONE = ("flux2", "ltxv")  # odd sizes are nothing special to them
NO_ODD = (*PATCH_ONE, "hunyuan_video")  # ComfyUI's own HunyuanVideo cannot do odd sizes


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One call: its arguments, what ComfyUI's network returned, and the unet_config of its model."""

    checkpoint: Path
    x: Tensor
    timestep: Tensor
    cond: dict[str, Any]
    output: Tensor
    hints: dict[str, Any]


def cases(name: str) -> list[str]:
    """What is recorded of a tiny `name`."""
    odd = [] if name in NO_ODD else ["odd"]
    return ["plain", "late", "batch", *odd, *EXTRA.get(name, {})]


EXTRA: dict[str, dict[str, dict[str, Any]]] = {  # what only some families can do
    "flux_dev": {"unguided": {"options": {"guidance": None}}, "poolless": {"pooled": 0}},
    "flux2": {"unguided": {"options": {"guidance": None}}},
    "chroma": {"guided": {"options": {"guidance": 2.5}}},
    "qwen_image": {
        "masked": {"mask": 13},
        "tall": {"latent": (1, 16, 1, 26, 6)},
        "frames": {"latent": (1, 16, 3, 8, 8)},
    },
    "z_image": {"masked": {"mask": 13}},
    "lumina2": {"masked": {"mask": 13}},
    "wan_i2v": {"imageless": {"clip_vision": None}, "short": {"text": (7, 4096)}, "long": {"text": (600, 4096)}},
    "wan_flf2v": {"first and last": {"clip_vision": (514, 1280)}},
    "wan_5b": {"kept": {"keep_frames": 1}},
    "ltxv": {"slow": {"options": {"frame_rate": 12}}, "unpadded": {"mask": 32}, "kept": {"keep_frames": 1}},
    "hunyuan_video": {"masked": {"mask": 13}, "unguided": {"options": {"guidance": None}}},
}


def all_cases() -> list[tuple[str, str]]:
    return [(name, case) for name in TINY for case in cases(name)]


def record(comfy: ComfyInstall, folder: Path) -> None:
    """Raises RuntimeError with ComfyUI's last words where it fails."""
    jobs = [_job(name, dtype, folder) for name in TINY for dtype in DTYPES]
    listed = folder / "jobs.json"
    listed.write_text(json.dumps(jobs))
    command = [comfy.python, HERE / "record_comfyui.py", comfy.root, OVERRIDE, listed]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder, timeout=600)
    if done.returncode:
        raise RuntimeError(f"ComfyUI could not record: {done.stderr[-3000:]}")


def replay(folder: Path, name: str, case: str, dtype: str) -> Recording:
    with safe_open(folder / dtype / name / f"{case}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        told = file.metadata()
    return Recording(
        checkpoint=_checkpoint(folder, name),
        x=tensors["x"],
        timestep=tensors["timestep"],
        cond={**_conditions(tensors), **json.loads(told["plain"])},
        output=tensors["output"],
        hints=json.loads(told["hints"]),
    )


def _conditions(tensors: dict[str, Tensor]) -> dict[str, Any]:
    conditions: dict[str, Any] = {}
    for key in sorted(key for key in tensors if key.startswith("cond.")):
        _, name, *index = key.split(".")
        if index:
            conditions.setdefault(name, []).append(tensors[key])
        else:
            conditions[name] = tensors[key]
    return conditions


def _checkpoint(folder: Path, name: str) -> Path:
    return folder / "checkpoints" / f"cp_tiny_{name}.safetensors"


def _job(name: str, dtype: str, folder: Path) -> dict[str, Any]:
    path = _checkpoint(folder, name)
    if not path.exists():
        write(path.parent, name)
    tried = [_case(name, TINY[name], case) for case in cases(name)]
    return {"path": str(path), "out": str(folder / dtype / name), "dtype": dtype, "cases": tried}


def _case(name: str, tiny: Tiny, case: str) -> dict[str, Any]:
    changes = EXTRA.get(name, {}).get(case, {})
    latent = list(changes.get("latent", tiny.latent))
    if case == "batch":
        latent[0] = 2
    if case == "odd":
        latent[-2:] = [latent[-2] - 1, latent[-1] - 3]
    options = {"guidance": tiny.guidance} if tiny.guidance is not None else {}
    if tiny.frame_rate:
        options["frame_rate"] = tiny.frame_rate
    cond = {
        "text": tiny.text,
        "pooled": tiny.pooled,
        "mask": tiny.mask,
        "clip_vision": (257, 1280) if tiny.clip_vision else None,
        "concat": tiny.latent[1:] if tiny.clip_vision else None,
        **{key: value for key, value in changes.items() if key not in ("latent", "options", "keep_frames")},
        "options": {**options, **changes.get("options", {})},
    }
    sigma, keep = 0.31 if case == "late" else 0.87, changes.get("keep_frames", 0)
    return {"name": case, "latent": latent, "sigma": sigma, "cond": cond, "keep_frames": keep}
