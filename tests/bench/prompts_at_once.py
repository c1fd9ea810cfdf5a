"""Measures a positive and a negative prompt on a real ComfyUI with two CPU workers and a CLIP-L of real size, whose
weights are random: seconds of the graph, with and without another node that runs before them.

    python -m tests.bench.prompts_at_once
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
from pathlib import Path

from ..comfyui.client import Graph
from ..comfyui.comfy import OUR_ROOT, ComfyInstall, find_comfy, why_there_is_none
from ..comfyui.server import Server, running_server
from ..comfyui.vae_graphs import TWO, in_workers, node

ROUNDS = 5
WORDS = 700  # some ten times what CLIP-L reads at once
SECONDS = 3.0  # of the other node
WRITE = """
import sys
from tests.zoo.tiny import start_comfyui
start_comfyui()
import torch
from comfy.sd1_clip import SD1ClipModel
from safetensors.torch import save_file
from tests.zoo.files import weights_of
encoder = SD1ClipModel(dtype=torch.float32).clip_l.transformer
for weight in encoder.parameters():
    weight.data = torch.randn(weight.shape) * 0.02
save_file(weights_of(encoder), sys.argv[1])
"""
nonces = itertools.count(1)


def write_clip(comfy: ComfyInstall, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [comfy.python, "-c", WRITE, folder / "real_clip_l.safetensors"]
    subprocess.run(command, check=True, cwd=OUR_ROOT, env={**os.environ, "COMFYUI_PATH": str(comfy.root)})


def graph(*, other: bool) -> Graph:
    loader = node("CPTestLoadClip", files="real_clip_l.safetensors", type="STABLE_DIFFUSION", options=json.dumps({}))
    made = in_workers("clip", loader, TWO)
    for name in ("positive", "negative"):
        made[name] = node("CLIPTextEncode", clip=["clip", 0], text=f"{'fox ' * WORDS} {next(nonces)}")
        made[f"save {name}"] = node("CPTestSaveEncoded", conditioning=[name, 0], name=name)
    if other:
        made["other"] = node("CPTestUntilLogged", clip=["clip", 0], text="nothing", times=0, seconds=SECONDS)
        made["other"]["inputs"]["times"] = -next(nonces)  # is not cached
    return made


def seconds(server: Server, *, other: bool) -> float:
    """Of the whole graph, whose texts are new."""
    client = server.client
    prompt = client.queue(graph(other=other))
    client.finish(prompt, timeout=600)
    times = {
        kind: content["timestamp"] for kind, content in client.get(f"/history/{prompt}")[prompt]["status"]["messages"]
    }
    return float(times["execution_success"] - times["execution_start"]) / 1000


def main() -> None:
    comfy = find_comfy()
    assert comfy is not None, why_there_is_none()
    with running_server(comfy) as server:
        write_clip(comfy, server.base / "models" / "text_encoders")
        seconds(server, other=False)  # starts the workers, and loads
        print("| | seconds, median | all |\n|---|---|---|")
        for name, other in (("two prompts", False), (f"a node of {SECONDS:g} s, then two prompts", True)):
            each = [seconds(server, other=other) for _ in range(ROUNDS)]
            print(f"| {name} | {statistics.median(each):.2f} | {', '.join(f'{one:.2f}' for one in each)} |", flush=True)


if __name__ == "__main__":
    main()
