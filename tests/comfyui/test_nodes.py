"""Every node of ComfyUI's that makes something for a sampler gives KSampler's latent on two workers, or is refused by
name. A choice that has every kind of socket runs always; CP_TEST_SWEEP=1 runs all, and so does
`python -m tests.comfyui.nodes`."""

from __future__ import annotations

import os

import pytest

from .nodes import Row, sweep, table, trials_of
from .nodes_benches import write_benches
from .nodes_data import NOT_TRIED, ONLY_ON, REFUSED, USUAL
from .nodes_graphs import covering, wanted
from .server import Server


@pytest.fixture(scope="module")
def rows(shared_server: Server) -> list[Row]:
    """Of all nodes, or of some that have every kind of socket between them."""
    info = shared_server.client.get("/object_info")
    trials = trials_of(info)
    if not os.environ.get("CP_TEST_SWEEP"):
        trials = covering(info, [trial for trial in trials if trial.bench.name in USUAL])
    write_benches(shared_server, {trial.bench.name for trial in trials})
    return sweep(shared_server.client, trials)


def test_a_node_gives_ksamplers_latent_or_is_refused(rows: list[Row]) -> None:
    wrong = [row for row in rows if row.outcome in ("different", "failed")]
    assert not wrong, "\n" + table(wrong)


def test_comfyui_alone_samples_every_node_where_it_is_tried(rows: list[Row]) -> None:
    """What it cannot is in NOT_TRIED with its reason, or in ONLY_ON with the networks where it can."""
    untried = [row for row in rows if row.outcome == "untried"]
    assert not untried, "\n" + table(untried)


def test_refused_are_the_nodes_that_are_known_to_be(rows: list[Row]) -> None:
    refused = {(row.node, row.bench) for row in rows if row.outcome == "refused"}
    assert refused == {(row.node, row.bench) for row in rows} & REFUSED


def test_the_tables_name_nodes_that_there_are(server: Server) -> None:
    assert {*NOT_TRIED, *ONLY_ON, *(node for node, _ in REFUSED)} <= {*wanted(server.client.get("/object_info"))}
    assert not {*NOT_TRIED} & {*ONLY_ON}
