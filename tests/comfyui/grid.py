"""Every sampler with every scheduler of ComfyUI on tiny FLUX schnell: the workers' latents beside KSampler's.

    python -m tests.comfyui.grid --samplers euler,heun --steps 8 --family flux_dev

`one ulp` is KSampler itself with its noise moved by one unit in the last place: what the sampler makes of rounding.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .client import Client, Graph
from .comfy import find_comfy, why_there_is_none
from .graphs import TEXTS, Job, Parallel, sampling_graph
from .latents import apart, saved_latents
from .server import running_server

BAR = 1e-4  # of the latent's standard deviation, float32
AMPLIFIED = 10  # times what one ulp in the noise does to KSampler: an evaluation in parts rounds more than once
ONE_WORKER = Parallel(ring_degree=1, ulysses_degree=1)
RING_2 = Parallel(ring_degree=2, ulysses_degree=1)
VARIANTS = ("one ulp", "1 worker", "2 workers", "2 workers, loaded")
SCHNELL = Job(family="flux_schnell", cfg=2.0, steps=5, size=(8, 10), prompt_tokens=(7, 7))

Pair = tuple[str, str]  # sampler and scheduler
Latents = dict[Pair, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """How far each way is from KSampler's latent, by the names in WAYS."""

    pair: Pair
    apart: dict[str, float]

    @property
    def worst(self) -> float:
        return max(distance for variant, distance in self.apart.items() if variant != "one ulp")

    @property
    def equal(self) -> bool:
        return self.worst <= max(BAR, AMPLIFIED * self.apart.get("one ulp", 0))


def all_pairs(client: Client) -> list[Pair]:
    """As the server's KSampler lists them."""
    widgets = client.get("/object_info/KSampler")["KSampler"]["input"]["required"]
    samplers, schedulers = (choices(widgets[name]) for name in ("sampler_name", "scheduler"))
    return list(itertools.product(samplers, schedulers))


def choices(widget: list[Any]) -> list[str]:
    """A combo's options, in the old spelling and the new."""
    return widget[1]["options"] if widget[0] == "COMBO" else widget[0]


def compare(client: Client, pairs: Sequence[Pair], job: Job = SCHNELL, variants: Iterable[str] = VARIANTS) -> list[Row]:
    want = sample(client, "native", pairs, job)
    got = {variant: sample(client, variant, pairs, job) for variant in variants}
    return [
        Row(pair=pair, apart={variant: apart(got[variant][pair], want[pair]) for variant in variants}) for pair in pairs
    ]


def sample(client: Client, variant: str, pairs: Sequence[Pair], job: Job) -> Latents:
    """One prompt a sampler, all queued before the first one ends."""
    since = client.now()
    by_sampler = [list(group) for _, group in itertools.groupby(sorted(pairs), key=lambda pair: pair[0])]
    queued = [(group, client.queue(many(job, variant, group))) for group in by_sampler]
    latents: Latents = {}
    for group, prompt in queued:
        saved = saved_latents(client.finish(prompt, since=since, timeout=600))
        latents |= {pair: saved[f"save_{index}"] for index, pair in enumerate(group)}
    return latents


def many(job: Job, variant: str, pairs: Sequence[Pair]) -> Graph:
    """A graph that samples one latent with each of `pairs`."""
    parallel = ONE_WORKER if "1 worker" in variant else RING_2 if "2 workers" in variant else None
    loaded = "loaded" in variant
    graph = sampling_graph(job, "KSampler" if loaded or parallel is None else "CPSampler", parallel)
    if loaded:
        inputs = {"unet_name": f"{job.family}.safetensors", "cp_config": graph["sampler"]["inputs"].pop("cp_config")}
        graph["model"] = {"class_type": "CPLoadDiffusionModel", "inputs": inputs}
    if variant == "one ulp":
        graph["moved"] = {"class_type": "CPTestOneUlp", "inputs": {"model": ["model", 0]}}
        graph["sampler"]["inputs"]["model"] = ["moved", 0]
    sampler, save = graph.pop("sampler"), graph.pop("save")
    for index, (name, scheduler) in enumerate(pairs):
        inputs = {**sampler["inputs"], "sampler_name": name, "scheduler": scheduler}
        graph[f"sampler_{index}"] = {**sampler, "inputs": inputs}
        file = f"{save['inputs']['name']}_{index}"
        graph[f"save_{index}"] = {**save, "inputs": {"samples": [f"sampler_{index}", 0], "name": file}}
    return graph


def table(rows: Sequence[Row], variants: Sequence[str] = VARIANTS) -> str:
    """The worst first."""
    lines = [f"{'sampler':24}{'scheduler':18}" + "".join(f"{variant:>20}" for variant in variants)]
    for row in sorted(rows, key=lambda row: -row.worst):
        cells = "".join(f"{row.apart[variant]:20.1e}" for variant in variants)
        mark = "" if row.worst <= BAR else "  amplified" if row.equal else "  NOT EQUAL"
        lines.append(f"{row.pair[0]:24}{row.pair[1]:18}{cells}{mark}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", help="names, separated by commas; all by default")
    parser.add_argument("--schedulers", help="the same of schedulers")
    parser.add_argument("--family", choices=list(TEXTS), default=SCHNELL.family)
    parser.add_argument("--steps", type=int, default=SCHNELL.steps)
    parser.add_argument("--cfg", type=float, default=SCHNELL.cfg)
    arguments = parser.parse_args()
    if (comfy := find_comfy()) is None:
        print(why_there_is_none())
        return 2
    job = replace(SCHNELL, family=arguments.family, steps=arguments.steps, cfg=arguments.cfg)
    started = time.monotonic()
    with running_server(comfy) as server:
        wanted = [
            set(argument.split(",")) if argument else None for argument in (arguments.samplers, arguments.schedulers)
        ]
        pairs = [
            pair
            for pair in all_pairs(server.client)
            if all(names is None or name in names for name, names in zip(pair, wanted, strict=True))
        ]
        rows = compare(server.client, pairs, job)
    print(table(rows))
    over = [row for row in rows if row.worst > BAR]
    broken = [row for row in rows if not row.equal]
    print(f"{len(rows)} combinations in {time.monotonic() - started:.0f} s: {len(over)} over {BAR:.0e} of the standard "
          f"deviation, {len(broken)} of them more than {AMPLIFIED} times what one ulp does to KSampler")  # fmt: skip
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
