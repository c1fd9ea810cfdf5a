"""ControlNets in the workers beside the loop in ComfyUI's process, where they ran before: a real ComfyUI, tiny files.

    python -m tests.bench.controlnets [--scenes SDXL FLUX] [--cuts ring] [--cfg 4] [--repeats 3] [--json out.json]

Two in a chain, the second with a picture for each image, batch 2. The loop is in ComfyUI's process where KSampler has
the MODEL of CP Load Diffusion Model. Of the repeats the fastest counts: wall seconds, CPU seconds of host and workers
together, bytes sent to the workers and how often, and the largest difference from KSampler in standard deviations.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..comfyui.client import Graph
from ..comfyui.comfy import find_comfy
from ..comfyui.graphs import Parallel
from ..comfyui.latents import apart, latent_of
from ..comfyui.server import Server, running_server
from ..comfyui.test_control_nets import ONE, PROMPTS, RING, SCENES, ULYSSES, Scene
from ..comfyui.test_kin import node
from . import harness

CUTS = {"1 worker": ONE, "prompts": PROMPTS, "images": Parallel(data_degree=2, cfg_degree=1), "ring": RING,
        "ulysses": ULYSSES}  # fmt: skip
TICK = os.sysconf("SC_CLK_TCK")
COLUMNS = {"ControlNets on": "{scene}", "cfg": "{cfg:g}", "cut": "{cut}", "loop in": "{loop}", "apart": "{apart:.1e}",
           "wall s": "{wall:.2f}", "CPU s": "{cpu:.2f}", "MiB sent (times)": "{mib:.1f} ({sent})"}  # fmt: skip


def main() -> None:
    options = harness.options(
        __doc__, scenes=["SDXL", "FLUX"], cuts=[*CUTS], cfg=[1.0, 4.0], steps=5, size=48, repeats=3
    )
    comfy = find_comfy()
    assert comfy is not None
    with running_server(comfy, env={"CP_TEST_FAULT": "meter"}) as server:
        server.write_tiny("vaes", "control_nets")
        harness.report(_rows(server, options), COLUMNS, options.json)


def _rows(server: Server, options: argparse.Namespace) -> Iterator[harness.Row]:
    side = options.size
    for cut in options.cuts:
        for name in options.scenes:
            for cfg in options.cfg:
                if cut == "prompts" and cfg == 1:
                    continue
                scene = SCENES[name].on(cfg=cfg, steps=options.steps, size=(side, side))
                want = latent_of(server.client.run(scene.graph(None)))
                for loop in "ComfyUI", "the workers":
                    made = _fastest(server, scene, CUTS[cut], loop, options.repeats, want)
                    yield {"scene": name, "cfg": cfg, "cut": cut, "loop": loop, **made}


def _fastest(server: Server, scene: Scene, parallel: Parallel, loop: str, repeats: int, want: Any) -> harness.Row:
    parallel = replace(parallel, cfg_degree=parallel.cfg_degree or 1)

    def run() -> harness.Row:
        since, began, cpu = server.log_size(), time.monotonic(), _cpu_seconds(server)
        latent = latent_of(server.client.run(_graph(scene, parallel, loop)))
        wall, cpu = time.monotonic() - began, _cpu_seconds(server) - cpu
        bytes_ = [int(size) for size in re.findall(r"\[meter\] (\d+) bytes", server.log(since))]
        return {"apart": apart(latent, want), "wall": wall, "cpu": cpu, "mib": sum(bytes_) / 2**20, "sent": len(bytes_)}

    measured = harness.turns({loop: run}, repeats)[loop]  # the first run starts the workers, and loads
    return min(measured, key=lambda each: each["cpu"])


def _graph(scene: Scene, parallel: Parallel, loop: str) -> Graph:
    if loop != "ComfyUI":
        return scene.graph(parallel)
    graph = scene.graph(None)
    graph["loader_config"] = node("CPParallelConfig", **vars(parallel))
    graph["model"] = node(
        "CPLoadDiffusionModel", unet_name=f"{scene.network}.safetensors", cp_config=["loader_config", 0]
    )
    return graph


def _cpu_seconds(server: Server) -> float:
    """Of the server and its workers."""
    ticks = 0
    for process in {server.process.pid, *(worker.pid for worker in server.workers().values())}:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


if __name__ == "__main__":
    main()
