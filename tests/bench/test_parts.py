"""The table of parts stands on the page on machines, which says why what one GPU computes is not divided."""

from __future__ import annotations

from pathlib import Path

from .parts import FILMS, LIMIT, rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "your-gpus.md").read_text(encoding="utf-8")


def test_the_page_on_machines_has_the_table_of_parts() -> None:
    assert "\n".join(rows()) in PAGE


def test_each_part_on_one_gpu_that_takes_a_tenth_of_the_time_has_its_reason_on_the_page() -> None:
    alone = [part for film in FILMS for part in film.parts if part.where.startswith("one GPU")]
    large = {part.name.split(",")[0] for film in FILMS for part in film.parts
             if part in alone and max(film.shares(part)) > LIMIT}  # fmt: skip
    assert large == {"text encoder"}
    assert all(f"- **{part.name.split(',')[0]}**: " in PAGE for part in alone)


def test_networks_and_vaes_of_these_models_are_divided() -> None:
    for film in FILMS:
        divided = [part.name for part in film.parts if part.where.startswith("all GPUs")]
        assert [name for name in divided if name.startswith("network")], film.name
        assert "VAE" in divided, film.name
