"""A worker group answers, cancels, fails and ends as it promises. Real processes, CPU and gloo, no ComfyUI."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import pytest
import torch

from parallel_runtime import demo
from parallel_runtime.demo import words_and_pictures
from parallel_runtime.demo.words_and_pictures import demo_job
from parallel_runtime.errors import Refused
from parallel_runtime.explain.plan_report import FLOAT8_ERROR, FLOAT8_RING_ERROR
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import Parallelism

from ..groups import (
    Stop,
    flux_job,
    listening_addresses,
    models_of,
    on_cpu,
    our_processes,
    samples,
    spec_of,
    wait_until,
    workers_of,
)
from ..holdings import holdings
from ..zoo.checkpoints import write

ULYSSES = Parallelism(ulysses_degree=2)
RING = Parallelism(ring_degree=2)


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


@pytest.fixture(scope="module")
def other_flux(tmp_path_factory):
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell", seed=99))


@pytest.fixture(scope="module")
def alone(flux):
    """What one worker makes of the job that the others are asked for."""
    with WorkerGroup(on_cpu(Parallelism())) as group:
        yield group


@pytest.fixture(scope="module")
def pair():
    with WorkerGroup(on_cpu(ULYSSES)) as group:
        yield group


def difference(a, b):
    return ((a - b).abs().max() / b.std()).item()


@pytest.mark.parametrize("parallelism", [ULYSSES, RING], ids=["ulysses", "ring"])
@pytest.mark.parametrize(("size", "tokens"), [((8, 8), 8), ((7, 11), 7), ((3, 5), 1)])
def test_two_workers_draw_what_one_draws(alone, pair, flux, parallelism, size, tokens):
    one = samples(alone, flux, Parallelism(), size=size, tokens=tokens)
    two = samples(pair, flux, parallelism, size=size, tokens=tokens)
    assert difference(two, one) < 2e-5


def test_in_float8_the_demo_draws_as_far_off_as_cp_plan_says_and_exactly_again_without(alone, pair):
    noise = torch.randn(1, words_and_pictures.CHANNELS, 16, 16, generator=torch.Generator().manual_seed(0))
    job = demo_job("a red circle on a white background", noise, steps=5, cfg=2.5)

    def drawn(group: WorkerGroup, parallelism: Parallelism) -> torch.Tensor:
        return group.run(demo.spec(), parallelism, job).value["samples"]

    one, exact = drawn(alone, Parallelism()), drawn(pair, ULYSSES)
    errors = [
        float((drawn(pair, degrees.with_options(comm_dtype="float8_e4m3fn")) - one).square().mean().sqrt() / one.std())
        for degrees in (ULYSSES, RING)
    ]
    assert FLOAT8_ERROR / 2 < errors[0] < 1.5 * FLOAT8_ERROR
    assert FLOAT8_RING_ERROR / 2 < errors[1] < 1.5 * FLOAT8_RING_ERROR, "a rank's own keys are exact in a ring"
    assert drawn(pair, ULYSSES).equal(exact), "bits as before"
    for group in (alone, pair):  # which other tests count the models of
        group.free(demo.spec())


@pytest.mark.parametrize(
    "batch_groups",
    [Parallelism(cfg_degree=2), Parallelism(data_degree=2)],
    ids=["branches of guidance", "rows of a batch"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_two_groups_draw_what_one_worker_draws(alone, pair, flux, batch_groups, batch):
    one = samples(alone, flux, Parallelism(), batch=batch, negative_tokens=12)
    two = samples(pair, flux, batch_groups, batch=batch, negative_tokens=12)
    assert difference(two, one) < 2e-5


FOUR = [
    Parallelism(ring_degree=2, ulysses_degree=2),
    Parallelism(cfg_degree=2, ring_degree=2),
    Parallelism(data_degree=2, cfg_degree=2),
]


@pytest.mark.parametrize(
    "parallelisms",
    [
        pytest.param([Parallelism(ring_degree=3), Parallelism(data_degree=3)], id="3 workers", marks=pytest.mark.sweep),
        pytest.param(FOUR, id="4 workers", marks=pytest.mark.sweep),
    ],
)
def test_more_workers_draw_what_one_draws(alone, flux, parallelisms):
    job = {"size": (7, 11), "tokens": 5, "negative_tokens": 2, "batch": 2}
    one = samples(alone, flux, Parallelism(), **job)
    with WorkerGroup(on_cpu(parallelisms[0])) as group:
        for parallelism in parallelisms:
            assert difference(samples(group, flux, parallelism, **job), one) < 2e-5, parallelism


def test_models_stay_when_degrees_or_the_model_change(pair, flux, other_flux):
    pids = workers_of(pair)
    first = samples(pair, flux, ULYSSES)
    samples(pair, flux, RING)
    other = samples(pair, other_flux, ULYSSES)
    assert models_of(pair) == [{flux.fingerprint, other_flux.fingerprint}] * 2
    assert difference(other, first) > 0.1
    assert torch.equal(samples(pair, flux, ULYSSES), first)
    assert workers_of(pair) == pids


def test_models_stay_until_they_are_given_back(pair, flux, other_flux):
    before = samples(pair, flux, ULYSSES)
    samples(pair, other_flux, ULYSSES)
    assert models_of(pair) == [{flux.fingerprint, other_flux.fingerprint}] * 2
    assert all(rank.other_models_bytes(flux.fingerprint) < rank.rank_bytes for rank in pair.measure())
    pair.free(flux, "offload")
    assert pair.payloads.has_model(flux)
    assert torch.equal(samples(pair, flux, ULYSSES), before)
    pair.free(flux)
    assert not pair.payloads.has_model(flux)
    assert pair.payloads.has_model(other_flux)
    assert torch.equal(samples(pair, flux, ULYSSES), before)


def test_every_step_is_reported_in_order(pair, flux):
    steps = []
    pair.run(flux, ULYSSES, flux_job(steps=6), on_step=lambda step, x0, x, total: steps.append((step, total)))
    assert steps == sorted(set(steps))
    assert steps[0] == (0, 6)
    assert steps[-1] == (5, 6)


@pytest.mark.parametrize("where", ["on_step", "watch"])
def test_an_interrupt_cancels_every_rank_and_the_group_stays_warm(pair, flux, where):
    before = samples(pair, flux, ULYSSES, steps=5)
    started = time.monotonic()

    def interrupt(*_):
        if time.monotonic() - started > 0.3:
            raise Stop

    with pytest.raises(Stop):
        pair.run(flux, ULYSSES, flux_job(steps=100_000), **{where: interrupt})

    assert time.monotonic() - started < 5
    assert pair.alive
    assert torch.equal(samples(pair, flux, ULYSSES, steps=5), before)


@pytest.mark.sweep
def test_two_hundred_requests_leave_nothing_in_host_and_workers(pair, flux):
    def resources():
        return [holdings(pid) for pid in (os.getpid(), *workers_of(pair))]

    for _ in range(20):
        samples(pair, flux, ULYSSES, steps=1)
    before = resources()
    for seed in range(200):
        samples(pair, flux, ULYSSES, steps=1, seed=seed)

    def nothing_is_left() -> bool:  # a worker has answered a moment before it closes what it sent
        both = list(zip(before, resources(), strict=True))
        return all(now.descriptors <= was.descriptors and now.threads <= was.threads for was, now in both)

    wait_until(nothing_is_left, 2)
    for was, now in zip(before, resources(), strict=True):
        assert now.memory_mb - was.memory_mb < 8


@pytest.mark.sweep  # it compares times: only on a quiet machine
def test_a_host_that_is_behind_does_not_hold_up_the_workers(alone, flux):
    """More steps than the socket has room for, and nobody looks at them for a long time."""

    def seconds(steps, on_step):
        job = replace(flux_job(steps=steps, size=(2, 2), tokens=1), cfg=1.0)
        return alone.run(flux, Parallelism(), job, on_step=on_step).seconds

    usual = 10 * seconds(32, lambda *_: None)
    assert seconds(320, lambda step, *_: time.sleep(2 * usual) if step == 0 else None) < 1.8 * usual


def test_noise_levels_that_are_no_numbers_give_a_latent_that_is_none(pair, flux):
    job = flux_job()
    job.sigmas[1] = math.nan
    assert pair.run(flux, ULYSSES, job).value["samples"].isnan().all()
    assert samples(pair, flux, ULYSSES).isfinite().all()


def test_a_payload_over_the_limit_is_refused_unallocated_and_the_group_lives(pair, flux):
    job = flux_job()
    job.positive["y"] = torch.zeros(1).expand(1 << 20, 1 << 20)
    with pytest.raises(Refused, match=r"would send 4096\.0 GiB to the workers, and the limit is 16\.0 GiB"):
        pair.run(flux, ULYSSES, job)
    assert pair.activity.now.state == "idle"
    samples(pair, flux, ULYSSES)


def test_a_job_that_cannot_travel_is_refused_and_the_group_lives(pair, flux):
    job = flux_job()
    job.positive["control"] = object()
    with pytest.raises(Refused, match=r"positive\.control"):
        pair.run(flux, ULYSSES, job)
    assert pair.alive
    samples(pair, flux, ULYSSES)


def test_nothing_listens_beyond_loopback(pair, flux):
    samples(pair, flux, ULYSSES)
    pids = [*workers_of(pair), pair._processes._torchrun.agent.pid]
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    for address in listening_addresses(pids):
        assert address.startswith(loopback)


def test_a_closed_group_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    group = WorkerGroup(on_cpu(Parallelism()))
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    pids = workers_of(group)
    group.close()
    assert not list(tmp_path.iterdir())
    assert not any(pid in our_processes() for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == descriptors
