"""Whether there is room on a device is told by what its ranks say at this moment, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel_runtime.planning.memory_model import Shortage, shortage
from parallel_runtime.specs import ModelSpec, Placement, SourceFile
from parallel_runtime.wire.messages import ModelMemory, Readings

GIB = 2**30
TWO = Placement(devices=("cuda:0", "cuda:1"))
SHARED = Placement(devices=("cuda:0", "cuda:0"))
MACHINES = Placement(devices=("cuda:0",), nnodes=2, rdzv_endpoint="10.0.0.1:29500")


def rank(free: float, spare: float = 0.0, **models: float | tuple[float, float]) -> Readings:
    """In GiB: what is free for anybody, what it keeps, and its models, or these and what recordings of them hold."""
    sizes = {model: size if isinstance(size, tuple) else (size, 0) for model, size in models.items()}
    weights = tuple(
        ModelMemory("model.safetensors", int(size * GIB), 0, model, int(more * GIB))
        for model, (size, more) in sizes.items()
    )
    return Readings(0, 80 * GIB, weights, free_bytes=int(free * GIB), allocator_free_bytes=int(spare * GIB))


def lacking(
    placement: Placement, *ranks: Readings, needed: float | tuple[float, ...], limit: float | tuple[float, ...] | None
) -> Shortage | None:
    """Each rank alike, or as each of them says, in GiB."""
    each = needed if isinstance(needed, tuple) else (needed,) * len(ranks)
    limits = limit if isinstance(limit, tuple) else (limit,) * len(ranks)
    limited = [None if one is None else int(one * GIB) for one in limits]
    sizes = [int(one * GIB) for one in each]
    return shortage(placement, ranks, "flux", sizes, limits=limited, limited_by="CP_MEMORY_GIB")


def lacks(
    placement: Placement,
    *ranks: Readings,
    needed: float | tuple[float, ...],
    limit: float | tuple[float, ...] | None = None,
) -> str:
    return str(lacking(placement, *ranks, needed=needed, limit=limit) or "")


def test_what_a_rank_has_for_this_model_is_free_for_it_and_what_it_has_for_others_is_not() -> None:
    assert not lacks(TWO, rank(20), rank(20), needed=20)
    assert not lacks(TWO, rank(2, 3, flux=15), rank(20), needed=20)
    assert (
        lacks(TWO, rank(5, wan=15), rank(20), needed=20) == "20.0 GiB are needed on cuda:0, and 5.0 GiB are free there"
    )


def test_models_whose_files_have_one_name_are_two() -> None:
    one, other = (
        ModelSpec(loader="a", files=(SourceFile(path=f"/{folder}/flux", size=1, mtime_ns=1),)) for folder in "ab"
    )
    assert one.title == other.title
    assert one.fingerprint == replace(one, patches_fingerprint="a LoRA").fingerprint != other.fingerprint


def test_recordings_of_this_model_are_what_it_needs_and_those_of_others_are_in_its_way() -> None:
    """The second run of a workflow finds as much as the first one."""
    assert not lacks(TWO, rank(2, 0, flux=(15, 3)), rank(20), needed=20)
    others = rank(1, 0, flux=15, wan=(10, 4))
    assert lacks(TWO, others, rank(20), needed=20) == "20.0 GiB are needed on cuda:0, and 16.0 GiB are free there"
    assert not lacks(TWO, rank(5, 0, flux=15, wan=10), rank(20), needed=20), "once they are dropped"
    one = Placement(devices=("cpu",))
    assert lacks(one, rank(80, wan=(6, 3)), needed=10, limit=18), "a limit counts them, too"
    assert (others.rank_bytes, others.recorded_bytes("wan"), others.recorded_bytes("flux")) == (29 * GIB, 4 * GIB, 0)


def test_the_device_that_lacks_most_is_named() -> None:
    assert lacks(TWO, rank(19), rank(7), needed=20) == "20.0 GiB are needed on cuda:1, and 7.0 GiB are free there"
    assert lacks(MACHINES, rank(30), rank(7), needed=20).startswith("20.0 GiB are needed on cuda:0 of machine 2, and 7")


def test_ranks_of_one_device_share_what_is_free_of_it() -> None:
    assert not lacks(SHARED, rank(40), rank(40), needed=20)
    assert not lacks(SHARED, rank(10, flux=15), rank(10, flux=15), needed=20)
    assert lacks(SHARED, rank(30), rank(30), needed=20) == "40.0 GiB are needed on cuda:0, and 30.0 GiB are free there"
    lacks_of = lacking(SHARED, rank(30), rank(30), needed=20, limit=None)
    assert lacks_of is not None
    assert lacks_of.each == 15 * GIB


def test_each_rank_is_asked_for_what_it_needs_itself() -> None:
    assert not lacks(TWO, rank(20), rank(8), needed=(18, 6))
    text = lacks(TWO, rank(20), rank(8), needed=(6, 18))
    assert text == "18.0 GiB are needed on cuda:1, and 8.0 GiB are free there"
    assert not lacks(SHARED, rank(20), rank(20), needed=(4, 16))
    assert not lacks(TWO, rank(80), rank(80), needed=(18, 6), limit=(20, 8))
    lacks_of = lacking(TWO, rank(80), rank(80), needed=(18, 9), limit=(20, 8))
    assert lacks_of is not None
    assert (lacks_of.ranks, lacks_of.each) == ((1,), 8 * GIB)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_limit_counts_what_the_rank_has_for_other_models(device: str) -> None:
    one = Placement(devices=(device,))
    assert not lacks(one, rank(80, flux=9), needed=10, limit=10)
    text = lacks(one, rank(80, wan=9), needed=10, limit=10)
    assert text == f"10.0 GiB are needed on {device}, and 1.0 GiB are free there, as CP_MEMORY_GIB says"


def test_main_memory_is_anybodys() -> None:
    assert not lacks(Placement(devices=("cpu",)), rank(0), needed=10)
