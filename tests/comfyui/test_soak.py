"""A short soak: the disturbances of `python -m tests.soak`, a few of each kind, against the session's server."""

from __future__ import annotations

import pytest

from ..soak.soak import Soak
from .server import Server

SHORT = ["cancel", "free", "bad input", "cancel", "clear queue", "free", "cancel", "bad input"]


@pytest.mark.sweep
def test_whatever_happens_in_between_a_run_gives_the_same_bits_and_nothing_piles_up(server: Server) -> None:
    soak = Soak(server, seed=0, cases=["flux, ulysses", "flux, ring"])
    for name in SHORT:
        soak.play(name)
    soak.check_holdings()
    assert not soak.failures, soak.report()
