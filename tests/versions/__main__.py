"""CP Sampler against KSampler, and CP VAE against VAE Decode, on several ComfyUIs, as a table:

    python -m tests.versions --comfyui PATH [--comfyui PATH ...] [CASE ...]

A PATH is a checkout of ComfyUI with a .venv or venv that has what its requirements.txt names. Two CPU workers compute
tiny networks in float32; a number is the largest difference in standard deviations of ComfyUI's own latent.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..comfyui.client import Graph, Interrupted, NodeError, ServerGone
from ..comfyui.comfy import ComfyInstall, find_comfy, install_at, why_there_is_none
from ..comfyui.graphs import Job, Parallel, sampling_graph, with_loras
from ..comfyui.latents import apart, latent_of
from ..comfyui.names import missing_names
from ..comfyui.server import Server, running_server
from ..comfyui.test_control_nets import SCENES, STAYS
from ..comfyui.vae_graphs import decoding

log = logging.getLogger(__name__)

BAR = 1e-4
ULYSSES = Parallel(devices="cpu,cpu", ring_degree=1, ulysses_degree=2, cfg_degree=1)
RING = replace(ULYSSES, ring_degree=2, ulysses_degree=1)
FLUX = Job(family="flux_dev", cfg=1.8)
WAN = Job(family="wan_t2v", cfg=3.0, sampler="uni_pc")
Make = Callable[[Parallel | None], Graph]


def sampled(job: Job, loras: Sequence[tuple[str, float]] = ()) -> Make:
    return lambda parallel: with_loras(sampling_graph(job, "CPSampler" if parallel else "KSampler", parallel), loras)


def decoded(file: str, shape: str) -> Make:
    return lambda parallel: decoding(file, shape, parallel or False)


def cases() -> dict[str, tuple[Make, Parallel]]:
    """What is compared, in this order: the weights of FLUX change their place from one case to the next."""
    flux = sampled(FLUX)
    return {
        "FLUX, auto": (flux, Parallel(devices="cpu,cpu")),
        "FLUX, ring": (flux, RING),
        "FLUX, weights shard": (flux, replace(ULYSSES, weights="shard")),
        "FLUX, weights offload": (flux, replace(ULYSSES, weights="offload")),
        "FLUX, weights replicate again": (flux, replace(ULYSSES, weights="replicate")),
        "FLUX, LoRA": (sampled(FLUX, [("flux_dev.safetensors", 0.8)]), ULYSSES),
        "FLUX, LoRA of another strength": (sampled(FLUX, [("flux_dev.safetensors", -0.5)]), ULYSSES),
        "FLUX, after_sampling offload": (flux, replace(ULYSSES, after_sampling="offload")),
        "FLUX, after_sampling unload": (flux, replace(ULYSSES, after_sampling="unload")),
        "Wan, uni_pc": (sampled(WAN), ULYSSES),
        "Wan, ring": (sampled(WAN), RING),
        "SDXL with two ControlNets": (SCENES["SDXL"].graph, RING),
        "SDXL without them": (replace(SCENES["SDXL"], chain=()).graph, RING),
        "FLUX with two ControlNets": (SCENES["FLUX"].graph, ULYSSES),
        "VAE, TAEF1": (decoded("taef1", "1,16,9,13"), RING),
        "VAE, Wan": (decoded("wan.safetensors", "1,16,3,7,9"), RING),
    }


def measured(server: Server, make: Make, parallel: Parallel) -> str:
    try:
        want, since = latent_of(server.client.run(make(None))), server.log_size()
        distance = apart(latent_of(server.client.run(make(parallel))), want)
        assert STAYS not in server.log(since), "the loop stayed in ComfyUI's process"
        return f"{distance:.1e}"
    except (NodeError, Interrupted, ServerGone, TimeoutError, AssertionError) as failure:
        log.info("%s", " ".join(str(failure).split())[:600])
        return "FAILED"


def column(comfy: ComfyInstall, writer: ComfyInstall, names: Sequence[str]) -> dict[str, str]:
    """What this ComfyUI gives for each case of these names; another one writes the models' files."""
    missing = missing_names(comfy.root)
    log.info("%s: %d names that we use are missing %s", comfy.root, len(missing), ", ".join(missing))
    with running_server(comfy) as server:
        server.write_tiny("control_nets", "vaes", by=writer)
        return {name: measured(server, *case) for name, case in cases().items() if name in names}


def table(columns: dict[str, dict[str, str]]) -> str:
    rows = [["case", *columns], ["---"] * (len(columns) + 1)]
    rows += [[name, *(results[name] for results in columns.values())] for name in next(iter(columns.values()))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def equal(result: str) -> bool:
    return result != "FAILED" and float(result) <= BAR


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help="a part of a case's name; all by default")
    parser.add_argument("--comfyui", action="append", required=True, type=Path, metavar="PATH", help="a checkout")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    names = [name for name in cases() if not asked.names or any(part in name for part in asked.names)]
    if (writer := find_comfy()) is None:
        log.error("%s", why_there_is_none())
        return 2
    columns: dict[str, dict[str, str]] = {}
    for path in asked.comfyui:
        comfy = install_at(path)
        columns[comfy.version] = column(comfy, writer, names)
        log.info("%s\n", table(columns))
    return int(not all(equal(result) for results in columns.values() for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
