"""How much main memory is left: the machine's, or what a container may still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_runtime.engine.comm import ranks

GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": f"{4 * GIB}", "memory.current": f"{3 * GIB}", "memory.stat": f"inactive_file {GIB // 2}"}, 1.5),
        ({"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}", "memory.stat": "inactive_file 0"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": f"{2 * GIB}",
                "memory/memory.usage_in_bytes": f"{GIB}",
                "memory/memory.stat": "inactive_file 0",
            },
            1,
        ),
    ],
    ids=["v2", "over its limit", "v1"],
)
def test_a_container_has_no_more_main_memory_than_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: float
) -> None:
    monkeypatch.setattr(ranks, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert ranks.host_free_bytes() == free * GIB


@pytest.mark.parametrize("files", [{}, {"memory.max": "max", "memory.current": "1", "memory.stat": "inactive_file 0"}])
def test_without_a_limit_it_is_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    monkeypatch.setattr(ranks, "CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert ranks.host_free_bytes() > GIB // 4
