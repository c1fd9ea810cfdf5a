"""Every node of ComfyUI's that makes something for a sampler, natively and on two CPU workers:

    python -m tests.comfyui.nodes [NAME ...] [--all] [--on BENCH,BENCH]

Each node is tried with its default values, on two pictures with two prompts, on a transformer that is cut and on a UNet
whose prompts and pictures are shared out. Without --all only what is not equal has a line.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .client import Client, FinishedPrompt, Graph, Interrupted, NodeError
from .comfy import find_comfy, why_there_is_none
from .grid import AMPLIFIED
from .latents import apart, latent_of
from .nodes_benches import benches, write_benches
from .nodes_data import BARE, NOT_TRIED, benches_of
from .nodes_graphs import Bench, Info, Lacking, Trial, wanted
from .server import running_server

log = logging.getLogger(__name__)

BAR = 1e-5  # of the latent's standard deviation
AT_ONCE = 40  # trials that are queued before the first of them is waited for
REFUSED = ".Refused:"  # in what a NodeError says


@dataclass(frozen=True, kw_only=True)
class Row:
    """`outcome`: equal, refused, different, failed (ours alone), or untried (ComfyUI alone does not sample it)."""

    node: str
    bench: str
    outcome: str
    apart: float = math.nan
    one_ulp: float = math.nan
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class _Queued:
    prompt: str = ""
    why: str = ""  # there is none


def sweep(client: Client, trials: Sequence[Trial]) -> list[Row]:
    """All trials queued, then compared; those that ComfyUI alone does not sample again, with needed sockets only; those
    that are apart again natively, moved by one unit in the last place."""
    info = client.get("/object_info")
    rows = _compared(client, info, trials)
    bare = [replace(trial, filled=False) for trial, row in zip(trials, rows, strict=True) if row.outcome == "untried"]
    again = {(row.node, row.bench): row for row in _compared(client, info, bare)}
    rows = [again.get((row.node, row.bench), row) for row in rows]
    filled = {(trial.node, trial.bench.name) for trial in trials if trial.filled} - set(again)
    return _moved(client, info, [(trial, row) for trial, row in zip(trials, rows, strict=True)], filled)


def _compared(client: Client, info: Info, trials: Sequence[Trial]) -> list[Row]:
    rows = []
    for start in range(0, len(trials), AT_ONCE):
        since = client.now()
        queued = [
            (trial, _queue(client, info, trial, None), _queue(client, info, trial, trial.bench.parallel))
            for trial in trials[start : start + AT_ONCE]
        ]
        rows += [_row(client, trial, native, ours, since) for trial, native, ours in queued]
        log.debug("%d of %d\n%s", len(rows), len(trials), table(rows[start:]))
    return rows


def _queue(client: Client, info: Info, trial: Trial, parallel: object, *, moved: bool = False) -> _Queued:
    try:
        graph: Graph = trial.graph(info, parallel, moved=moved)  # type: ignore[arg-type]  # None, or a Parallel
        return _Queued(client.queue(graph))
    except Lacking as lacking:
        return _Queued(why=f"there is no {lacking.args[0].removeprefix('a ')}")
    except NodeError as refused:  # a socket takes no such value
        return _Queued(why=" ".join(str(refused).split())[:300])


def _row(client: Client, trial: Trial, native: _Queued, ours: _Queued, since: int) -> Row:
    row = Row(node=trial.node, bench=trial.bench.name, outcome="untried")
    want, got = _finished(client, native, since), _finished(client, ours, since)
    seconds = _seconds(client, native, since) + _seconds(client, ours, since)
    row = replace(row, seconds=seconds)
    if isinstance(want, str):
        return replace(row, why=want)
    if isinstance(got, str):
        return replace(row, outcome="refused" if REFUSED in got else "failed", why=got)
    latent = latent_of(want)
    if not torch.isfinite(latent).all():
        return replace(row, why="ComfyUI alone makes numbers that are not finite")
    try:
        distance = apart(latent_of(got), latent)
    except AssertionError as unlike:
        return replace(row, outcome="different", apart=math.inf, why=str(unlike))
    return replace(row, outcome="equal" if distance <= BAR else "different", apart=distance)


def _finished(client: Client, queued: _Queued, since: int) -> FinishedPrompt | str:
    if queued.why:
        return queued.why
    try:
        return client.finish(queued.prompt, since=since, timeout=600)
    except (NodeError, Interrupted) as failure:
        return " ".join(str(failure).split())[:300]


def _seconds(client: Client, queued: _Queued, since: int) -> float:
    """From the start of the prompt to its end, by when the server said so."""
    times = [event.at for event in client.events(since) if event.data.get("prompt_id") == queued.prompt]
    return max(times) - min(times) if times else 0.0


def _moved(client: Client, info: Info, tried: list[tuple[Trial, Row]], filled: set[tuple[str, str]]) -> list[Row]:
    """Rows that are apart, with what one unit in the last place does to ComfyUI alone."""
    since = client.now()
    queued = {}
    for trial, row in tried:
        if row.outcome == "different" and math.isfinite(row.apart):
            same = replace(trial, filled=(row.node, row.bench) in filled)
            sides = [_queue(client, info, same, None, moved=moved) for moved in (False, True)]
            queued[row.node, row.bench] = sides
    return [_judged(client, row, queued.get((row.node, row.bench)), since) for _, row in tried]


def _judged(client: Client, row: Row, queued: list[_Queued] | None, since: int) -> Row:
    sides = [_finished(client, one, since) for one in queued or []]
    runs = [run for run in sides if isinstance(run, FinishedPrompt)]
    if len(runs) < 2:
        return row
    one_ulp = apart(*(latent_of(run) for run in runs))
    outcome = "equal" if row.apart <= AMPLIFIED * one_ulp else row.outcome
    return replace(row, outcome=outcome, one_ulp=one_ulp)


def trials_of(info: Info, names: Iterable[str] = (), on: Iterable[str] = ()) -> list[Trial]:
    """Every node, or those named, each on its benches, or on those named; nodes of one bench follow one another."""
    networks: dict[str, Bench] = benches()
    nodes = list(names) or [name for name in wanted(info) if name not in NOT_TRIED]
    pairs = [(node, bench) for node in nodes for bench in list(on) or benches_of(node)]
    pairs.sort(key=lambda pair: list(networks).index(pair[1]))
    return [Trial(node=node, bench=networks[bench], filled=node not in BARE) for node, bench in pairs]


def table(rows: Sequence[Row]) -> str:
    """The worst first."""
    order = ("different", "failed", "untried", "refused", "equal")
    lines = [f"{'node':40}{'network':18}{'outcome':11}{'apart':>9}{'one ulp':>9}{'seconds':>8}"]
    for row in sorted(rows, key=lambda row: (order.index(row.outcome), -_number(row.apart), row.node)):
        numbers = "".join("        -" if math.isnan(value) else f"{value:9.1e}" for value in (row.apart, row.one_ulp))
        lines.append(f"{row.node:40}{row.bench:18}{row.outcome:11}{numbers}{row.seconds:8.2f}  {row.why}".rstrip())
    return "\n".join(lines)


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.comfyui.nodes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="nodes; every one by default")
    parser.add_argument("--all", action="store_true", help="a line for what is equal, too")
    parser.add_argument("--on", default="", help="names of networks, separated by commas; each node's own by default")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if (comfy := find_comfy()) is None:
        log.error("%s", why_there_is_none())
        return 2
    started = time.monotonic()
    with running_server(comfy) as server:
        trials = trials_of(server.client.get("/object_info"), asked.names, filter(None, asked.on.split(",")))
        write_benches(server, {trial.bench.name for trial in trials})
        rows = sweep(server.client, trials)
    shown = rows if asked.all or asked.names else [row for row in rows if row.outcome != "equal"]
    log.info("%s", table(shown))
    counts = Counter(row.outcome for row in rows)
    log.info("%d runs in %.0f s: %s", len(rows), time.monotonic() - started,
             ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))  # fmt: skip
    return int(any(row.outcome in ("different", "failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
