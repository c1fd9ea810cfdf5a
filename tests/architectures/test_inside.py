"""ComfyUI's own patches that see each token by itself run inside the blocks of a network that is cut."""

from __future__ import annotations

from typing import Any

import pytest

from ..engine.conftest import Groups

EXACT = 1e-5
DEGREES = [(2, 1), (1, 2), (3, 1), (2, 2)]
GUIDED = [("flux", False), ("krea 2", False), ("hunyuan video", False), ("flux", True), ("chroma", False)]


def _run(networks: Groups, ring: int, ulysses: int, function: str, **arguments: Any) -> list[Any]:
    where = f"tests.architectures.inside_cases:{function}"
    return networks(ring * ulysses).run(where, ring=ring, ulysses=ulysses, **arguments)


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(("ring", "ulysses"), DEGREES)
@pytest.mark.parametrize(("name", "between"), GUIDED)
def test_normalized_attention_guidance_is_what_it_is_undivided(
    networks: Groups, name: str, between: bool, ring: int, ulysses: int
) -> None:
    assert max(_run(networks, ring, ulysses, "guided", name=name, between=between)) <= EXACT


@pytest.mark.parametrize(("ring", "ulysses"), DEGREES)
@pytest.mark.sweep(one_in=4)
def test_anima_lllite_goes_by_the_picture_at_each_ranks_tokens(networks: Groups, ring: int, ulysses: int) -> None:
    assert max(_run(networks, ring, ulysses, "controlled")) <= EXACT
