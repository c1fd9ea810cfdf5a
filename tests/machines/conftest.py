"""A network of two machines for the session's tests; where namespaces are not to be had they skip, loudly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ModelSpec, Parallelism
from parallel_runtime.wire.channel import TOKEN as TOKEN_VARIABLE

from ..groups import on_cpu, spec_of
from ..zoo.checkpoints import write
from .guest import Guest, joining
from .network import TOKEN, Network, network, why_there_is_none


@pytest.fixture(scope="session")
def namespaces() -> None:
    if reason := why_there_is_none():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def net(namespaces: None) -> Iterator[Network]:
    with pytest.MonkeyPatch.context() as patch, network() as made:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        yield made


@pytest.fixture(scope="module")
def guest(net: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    """The join command on the other machine."""
    with joining(tmp_path_factory.mktemp("guest"), namespace=net.second) as command:
        yield command


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return spec_of(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


@pytest.fixture(scope="module")
def alone(net: Network) -> Iterator[WorkerGroup]:
    """What one worker makes of the job that the others are asked for."""
    with WorkerGroup(on_cpu(Parallelism())) as group:
        yield group


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "guest"
