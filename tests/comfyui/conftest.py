"""One ComfyUI server for the session; where there is no ComfyUI these tests skip, loudly, and the others run."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from parallel_runtime.specs import BLOCK_BUFFERS

from ..zoo import checkpoints
from .cases import DEGREES
from .comfy import ComfyInstall, find_comfy, why_there_is_none
from .conditioning import SAMPLED, picture
from .graphs import Parallel
from .latents import latent_of
from .server import Server, running_server

USUAL = 2  # workers
VARIED = ("flux_dev", "wan_t2v", "qwen_image")  # the models that there are in every format


@pytest.fixture(scope="session")
def comfy() -> ComfyInstall:
    if (comfy_install := find_comfy()) is None:
        pytest.skip(why_there_is_none())
    return comfy_install


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
def native_network(shared_server: Server) -> Callable[[str], Tensor]:
    """KSampler's latent of each network, sampled once; their files lie in the server's folders from now on."""
    shared_server.write_tiny(networks=SAMPLED)
    return functools.cache(lambda name: latent_of(shared_server.client.run(picture(name))))


@pytest.fixture(scope="session")
def formats(comfy: ComfyInstall, shared_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's folder of diffusion models; some are there in every format, with blocks enough to be fetched."""
    folder = shared_server.base / "models" / "diffusion_models"
    script, sources = Path(__file__).with_name("write_formats.py"), []
    for name in VARIED:
        deep = {} if name == "flux_dev" else {"layers": BLOCK_BUFFERS + 1}
        source = checkpoints.write(tmp_path_factory.mktemp("deep"), name, **deep)
        sources.append(source.rename(folder.parent / f"{name}.safetensors"))
    subprocess.run([comfy.python, script, comfy.root, folder, *sources], check=True, capture_output=True)
    return folder


@pytest.fixture
def vaes(server: Server) -> Server:
    """The server with VAE files in its folders."""
    server.write_tiny()
    return server


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of as many workers follow one another, of all modules: to start a group costs more than most of them."""
    served = [item for item in items if "shared_server" in _fixtures(item)]
    moved = sorted((item for item in served if _workers(item) != USUAL), key=_workers)
    if moved:
        behind = items.index(served[-1]) + 1
        stay = [item for item in items[:behind] if item not in moved]
        items[:] = [*stay, *moved, *items[behind:]]


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else ()


def _workers(item: pytest.Item) -> int:
    """That its config asks for, or where it has none its module."""
    assert isinstance(item, pytest.Function)
    params = item.callspec.params if hasattr(item, "callspec") else {}
    configs = [DEGREES.get(value, value) if isinstance(value, str) else value for value in params.values()]
    asked = [config.workers for config in configs if isinstance(config, Parallel)]
    unsaid = any(name in ("parallel", "config") and value is None for name, value in params.items())
    return 1 if unsaid else max(asked, default=getattr(item.module, "WORKERS", USUAL))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and hasattr(item, "server_log"):
        report.sections.append(("ComfyUI's log during this test", item.server_log()[-8000:]))
    return report
