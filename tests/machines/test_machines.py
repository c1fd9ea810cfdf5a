"""Two machines, which are network namespaces here, sample one latent."""

from __future__ import annotations

import os
import time

import pytest
import torch

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import Parallelism

from ..groups import flux_job
from .jobs import Once, difference, samples
from .network import FIRST, SECOND, ULYSSES, on_two_machines

RING = Parallelism(ring_degree=2)


@pytest.fixture(scope="module")
def pair(guest):
    with WorkerGroup(on_two_machines()) as group:
        yield group


def test_the_first_rank_is_on_comfyuis_machine_and_the_other_on_the_other(pair, guest):
    assert list(guest.workers()) == [1]
    assert [pair._processes.machine_of(rank) for rank in range(2)] == ["", SECOND]


@pytest.mark.parametrize("parallelism", [ULYSSES, RING, Parallelism(cfg_degree=2)], ids=["ulysses", "ring", "cfg"])
@pytest.mark.sweep(one_in=3)
def test_two_machines_draw_what_one_worker_draws(alone, pair, flux, parallelism):
    job = {"size": (7, 11), "tokens": 5, "negative_tokens": 12}
    one = samples(alone, flux, Parallelism(), **job)
    assert difference(samples(pair, flux, parallelism, **job), one) < 2e-5


def test_everything_listens_on_the_address_that_was_named_or_on_the_machine_itself(net, pair, guest, flux):
    samples(pair, flux, RING)
    hexadecimal = {FIRST: "01004D0A:", SECOND: "02004D0A:"}
    for address, pid in ((FIRST, os.getpid()), (SECOND, guest.process.pid)):
        addresses = net.listening(pid)
        assert addresses, "gloo listens, at least"
        assert all(row.startswith((hexadecimal[address], "0100007F:")) for row in addresses), addresses


def test_a_cancel_stops_every_machine_and_the_group_stays_warm(pair, guest, flux):
    class Stop(BaseException):
        """Like ComfyUI's interrupt, no Exception."""

    def interrupt():
        raise Stop

    before = samples(pair, flux, ULYSSES, steps=5)
    workers = guest.workers()
    started = time.monotonic()
    with pytest.raises(Stop):
        pair.run(flux, ULYSSES, flux_job(steps=100_000), on_step=Once(interrupt))
    assert time.monotonic() - started < 5
    assert guest.workers() == workers
    assert torch.equal(samples(pair, flux, ULYSSES, steps=5), before)


@pytest.mark.sweep
def test_unloaded_workers_load_again(pair, flux):
    before = samples(pair, flux, ULYSSES)
    pair.free(flux)
    assert torch.equal(samples(pair, flux, ULYSSES), before)
