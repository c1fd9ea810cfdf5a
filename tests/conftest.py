"""What every test may rely on: `gpu` tests skip where torch sees no CUDA device."""

from __future__ import annotations

import importlib.util

import pytest


def _sees_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # two seconds: only when a gpu test was collected

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting_a_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if wanting_a_gpu and not _sees_cuda():
        for item in wanting_a_gpu:
            item.add_marker(pytest.mark.skip(reason="NO GPU: torch sees no CUDA device here"))
