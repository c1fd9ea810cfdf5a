"""One ComfyUI server for the session; where there is no ComfyUI these tests skip, loudly, and the others run."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from .cases import DEGREES
from .comfy import OUR_ROOT, ComfyInstall, find_comfy, why_there_is_none
from .latents import latent_of
from .networks import picture
from .server import Server, running_server


@pytest.fixture(scope="session")
def comfy() -> ComfyInstall:
    if (found := find_comfy()) is None:
        pytest.skip(why_there_is_none())
    return found


@pytest.fixture(scope="session")
def shared_server(comfy: ComfyInstall) -> Iterator[Server]:
    with running_server(comfy) as server:
        yield server


@pytest.fixture
def server(shared_server: Server, request: pytest.FixtureRequest) -> Iterator[Server]:
    """The session's server; what it logs during a test that fails is shown with the failure."""
    since = shared_server.log_size()
    request.node.server_log = lambda: shared_server.log(since)
    yield shared_server
    shared_server.client.settle()


@pytest.fixture(scope="session")
def native_network(comfy: ComfyInstall, shared_server: Server) -> Callable[[str], Tensor]:
    """KSampler's latent of each network, sampled once; their files lie in the server's folders from now on."""
    folder = shared_server.base / "models" / "diffusion_models" / "networks"
    folder.mkdir()
    command = [comfy.python, "-m", "tests.comfyui.write_networks", folder]
    environment = os.environ | {"COMFYUI_PATH": str(comfy.root)}
    subprocess.run(command, check=True, capture_output=True, cwd=OUR_ROOT, env=environment)
    return functools.cache(lambda name: latent_of(shared_server.client.run(picture(name))))


@pytest.fixture
def vaes(comfy: ComfyInstall, server: Server) -> Server:
    """The server with VAE files in its folders."""
    write_vaes(comfy, server)
    return server


def write_vaes(comfy: ComfyInstall, server: Server) -> None:
    models = server.base / "models"
    if not (models / "vae" / "wan.safetensors").exists():
        command = [str(comfy.python), "-m", "tests.vae.files", str(comfy.root), str(models)]
        subprocess.run(command, cwd=OUR_ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within a module the cases of as many workers follow one another, up and down by turns: a group serves many."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    turn = 1
    for members in modules.values():
        members.sort(key=lambda item: turn * _workers(item))
        turn = -turn if len({*map(_workers, members)}) > 1 else turn
    items[:] = [item for members in modules.values() for item in members]


def _workers(item: pytest.Item) -> int:
    """That its degrees ask for; two where it does not say."""
    params = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    asked = [DEGREES[value] for value in params if isinstance(value, str) and value in DEGREES]
    return max((degrees.ring_degree * degrees.ulysses_degree * degrees.pipeline_degree for degrees in asked), default=2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and hasattr(item, "server_log"):
        report.sections.append(("ComfyUI's log during this test", item.server_log()[-8000:]))
    return report
