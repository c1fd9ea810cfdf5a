"""Runs stock workflows that were made small, natively and migrated on two CPU workers, and compares what each of their
samplers made."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from parallel_runtime.commands.migrate import migrated

from ..zoo.checkpoints import write as write_tiny
from ..zoo.unets import UNET_FILES
from .client import Client, Graph, Interrupted, NodeError
from .conditioning import SAMPLED, WITHOUT_PLAN
from .graphs import Parallel
from .grid import AMPLIFIED
from .latents import apart, saved_latents
from .nodes_benches import CUT, write_benches
from .nodes_graphs import node
from .server import Server
from .stock_graphs import samplers
from .stock_small import NotSmall, Small, small
from .stock_zoo import Tiny

log = logging.getLogger(__name__)

BAR = 1e-5  # of the latent's standard deviation
TELLS_NOTHING = 1e-3  # where one ulp moves the native run as far, a difference shows neither right nor wrong
SECONDS = 300
REFUSED = ".Refused:"
STEPWISE = "the sampler runs in ComfyUI's process"
BY_ROWS = ("unet", "stage_")  # how the names of networks begin that a ring divides by rows of the picture


@dataclass(frozen=True, kw_only=True)
class Row:
    """`outcome`: equal, different, unclear (one ulp moves the native run as far), refused, failed (ours alone), not
    sampled (ComfyUI alone raises), or not small."""

    name: str
    outcome: str
    networks: tuple[str, ...] = ()
    samplers: int = 0
    apart: float = math.nan
    one_ulp: float = math.nan
    divided: str = ""
    stood_for: tuple[str, ...] = ()
    why: str = ""


def run_all(server: Server, graphs: Mapping[str, Graph], workers: int = 2) -> list[Row]:
    """Runs these workflows on one server, divided in a ring of so many workers."""
    ring = replace(CUT, ring_degree=workers, devices=",".join(["cpu"] * workers))
    info = server.client.get("/object_info")
    made = {name: _made_small(graph, info, name) for name, graph in graphs.items()}
    networks = {tiny.file: tiny for one in made.values() if isinstance(one, Small) for tiny in one.networks}
    write_files(server, list(networks.values()))
    rows = []
    for number, one in enumerate(made.values()):
        rows.append(one if isinstance(one, Row) else _compared(server, one, ring))
        log.info("%d of %d: %s", number + 1, len(made), line(rows[-1]))
    return rows


def _made_small(graph: Graph, info: Mapping[str, Any], name: str) -> Small | Row:
    try:
        return small(graph, info, name)
    except NotSmall as lacking:
        return Row(name=name, outcome="not small", why=str(lacking))


def write_files(server: Server, networks: Sequence[Tiny]) -> None:
    """The tiny files of these networks, once a server, and a LoRA for each."""
    models = server.base / "models"
    write_benches(server, {tiny.name for tiny in networks} & {*SAMPLED, *WITHOUT_PLAN, *UNET_FILES} | {"flux"})
    if not (z_image := models / "diffusion_models" / "z_image.safetensors").exists():  # as its patches are made for
        write_tiny(z_image.parent, "z_image").rename(z_image)
    for tiny in networks:
        file = _folder(models / "loras" / "stock") / f"{tiny.name}.safetensors"
        if not file.exists():
            save_file(_lora(models / "diffusion_models" / tiny.file), file)


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    return path


def _lora(network: Path) -> dict[str, torch.Tensor]:
    """For three matrices of its attentions."""
    dice, made = torch.Generator().manual_seed(5), {}
    with safe_open(network, framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - it is no mapping
    matrices = [key for key, shape in shapes.items() if len(shape) == 2 and key.endswith(".weight")]
    for key in [key for key in matrices if "attn" in key or "attention" in key][:3] or matrices[-3:]:
        out, into = shapes[key]
        stem = f"diffusion_model.{key.removesuffix('.weight')}"
        made[f"{stem}.lora_down.weight"] = torch.randn(4, into, generator=dice) * 0.1
        made[f"{stem}.lora_up.weight"] = torch.randn(out, 4, generator=dice) * 0.1
    return made


def parallel(graph: Graph, config: Parallel) -> Graph:
    """The graph as `python -m parallel_runtime migrate` leaves it where it has one CP Parallel Config."""
    made = copy.deepcopy(graph) | {"CP config": node("CPParallelConfig", **vars(config))}
    return migrated(made)[0]


def _compared(server: Server, made: Small, ring: Parallel) -> Row:
    row = Row(
        name=made.name, outcome="equal", samplers=len(samplers(made.graph)), stood_for=tuple(sorted(made.stood_for)),
        networks=tuple(tiny.name for tiny in made.networks),
    )  # fmt: skip
    want = _latents(server.client, made.graph)
    if isinstance(want, str):
        return replace(row, outcome="not sampled", why=want)
    if not all(torch.isfinite(latent).all() for latent in want.values()):
        return replace(row, outcome="not sampled", why="ComfyUI alone makes numbers that are not finite")
    since = server.log_size()
    got = _latents(server.client, parallel(made.graph, ring))
    why = ""
    if isinstance(got, str) and REFUSED in got:  # what a refusal of degrees says: leave them to the node
        why, since = got, server.log_size()
        got = _latents(server.client, parallel(made.graph, replace(ring, ring_degree=0, ulysses_degree=0)))
    divided = "the node's choice" if why else _divided(row.networks, server.log(since))
    row = replace(row, why=why, divided=divided)
    if isinstance(got, str):
        return replace(row, outcome="refused" if REFUSED in got else "failed", why=got)
    try:
        distance = max(apart(got[name], latent) for name, latent in want.items())
    except AssertionError as unlike:
        return replace(row, outcome="different", apart=math.inf, why=str(unlike))
    row = replace(row, apart=distance)
    return row if distance <= BAR else _judged(server.client, made, row, want)


def _judged(client: Client, made: Small, row: Row, want: Mapping[str, torch.Tensor]) -> Row:
    moved = _latents(client, _moved(made.graph))
    if isinstance(moved, str):
        return replace(row, outcome="different", why=f"cannot be moved by one ulp: {moved}")
    one_ulp = max(apart(moved[name], latent) for name, latent in want.items())
    if one_ulp > TELLS_NOTHING:
        return replace(row, one_ulp=one_ulp, outcome="unclear", why="one ulp moves the native run as far")
    outcome = "equal" if row.apart <= AMPLIFIED * one_ulp else "different"
    return replace(row, one_ulp=one_ulp, outcome=outcome)


def _moved(graph: Graph) -> Graph:
    """The native run with noise and latent moved by one unit in the last place, at every network."""
    moved = copy.deepcopy(graph)
    loaders = [name for name, call in graph.items() if call["class_type"] == "UNETLoader"]
    for call in list(moved.values()):
        for key, value in call["inputs"].items():
            if isinstance(value, list) and value[0] in loaders:
                call["inputs"][key] = [f"{value[0]} moved", value[1]]
    return moved | {f"{name} moved": node("CPTestOneUlp", model=[name, 0]) for name in loaders}


def _latents(client: Client, graph: Graph) -> dict[str, torch.Tensor] | str:
    """By sampler; or what failed, in a line."""
    try:
        return saved_latents(client.run(graph, timeout=SECONDS))
    except (NodeError, Interrupted) as failure:
        return " ".join(str(failure).split())[:400]
    except TimeoutError:
        client.settle()
        return f"it takes longer than {SECONDS} s"


def _divided(networks: Sequence[str], text: str) -> str:
    """How a ring divides these networks; "stepwise" where the log says that the loop ran in ComfyUI's process."""
    by = sorted({"rows" if name.startswith(BY_ROWS) else "tokens" for name in networks})
    return ", ".join([*by, *(["stepwise"] if STEPWISE in text else [])])


def line(row: Row) -> str:
    numbers = "" if math.isnan(row.apart) else f", {row.apart:.1e} apart"
    numbers += "" if math.isnan(row.one_ulp) else f" (one ulp: {row.one_ulp:.1e})"
    stand_ins = f"; stood for: {', '.join(row.stood_for)}" if row.stood_for else ""
    return f"{row.name}: {row.outcome} [{', '.join(row.networks)}]{numbers} {row.divided} {row.why}{stand_ins}"


def run_table(rows: Sequence[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    head = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    names = ("workflow", "networks", "outcome", "apart", "one ulp", "divided by", "why")
    lines = [f"{len(rows)} workflows: {head}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in sorted(rows, key=lambda row: (row.outcome, row.name)):
        numbers = ["" if math.isnan(value) else f"{value:.1e}" for value in (row.apart, row.one_ulp)]
        cells = [row.name, ", ".join(row.networks), row.outcome, *numbers, row.divided, row.why[:160].replace("|", "/")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
