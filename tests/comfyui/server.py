"""One real ComfyUI server in a throw-away base directory, with our pack and the test nodes as its custom nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .client import Client
from .comfy import DEVICE, OUR_ROOT, ComfyInstall
from .models import write_models
from .processes import MARK, Process, die_with_parent, marked_processes, wait_until_none

FLAGS = (
    *(("--cpu",) if DEVICE == "cpu" else ()),
    *(() if os.environ.get("CP_TEST_OWN_DTYPE") else ("--force-fp32",)),  # ComfyUI chooses half precision on a GPU
    "--use-pytorch-cross-attention",
    "--disable-auto-launch",
    "--disable-api-nodes",
    "--dont-print-server",
    "--database-url=sqlite:///:memory:",
)
_QUIET = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # tiny models, busy machines
if DEVICE != "cpu":
    _QUIET |= {"CP_NCCL_ON_ONE_CARD": "1", "NVIDIA_TF32_OVERRIDE": "0"}
START_SECONDS = float(os.environ.get("CP_TEST_START_SECONDS", "120"))  # more where many tests share few cores
SITE = str(OUR_ROOT / "tests" / "site")
STOP_SECONDS = 10
KINDS = {  # modules of tests/zoo that write files, with what they write last, or nearly so
    "unet_files": "gligen/unet.safetensors", "control_nets": "controlnet/sd15_t2i.safetensors",
    "model_patches": "model_patches/qwen_old.pt", "vaes": "vae_approx/taef1_decoder.safetensors",
    "text_encoders": "text_encoders/qwen3_4b.safetensors",
}  # fmt: skip
LEASH_SECONDS = 3  # a dead ComfyUI takes its workers with it within this


class Server:
    """`client` speaks to it; `base` holds everything that it writes, `scratch` is its TMPDIR."""

    def __init__(self, comfy: ComfyInstall, base: Path, *, flags: tuple[str, ...], env: Mapping[str, str]) -> None:
        self.comfy, self.base, self.scratch, self.log_path = comfy, base, base / "tmp", base / "server.log"
        self.mark, self.port = uuid.uuid4().hex, free_port()
        self.scratch.mkdir()
        command = [comfy.python, comfy.root / "main.py", "--base-directory", base, "--port", str(self.port)]
        chooses = any(flag.startswith("--use-") for flag in flags)  # an attention, of which there can be one
        usual = [flag for flag in FLAGS if not (chooses and flag.startswith("--use-"))]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*map(str, command), *usual, *flags],
                cwd=comfy.root,
                env={**os.environ, **_QUIET, "PYTHONPATH": SITE, MARK: self.mark, "TMPDIR": str(self.scratch), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # a killed pytest runs no fixture's end
            )

    def wait_until_up(self) -> None:
        started = time.monotonic()
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() - started > START_SECONDS:
                raise RuntimeError(f"ComfyUI did not come up (exit code {self.process.poll()}):\n{self.log()[-6000:]}")
            time.sleep(0.1)
        self.start_seconds = time.monotonic() - started
        self.client = Client(self.port)

    def write_tiny(self, *kinds: str, networks: Collection[str] = (), by: ComfyInstall | None = None) -> None:
        """Tiny files of these kinds (of all if none is named) are in its folders from now on, and these networks; an
        old ComfyUI has them written by another."""
        writer = by or self.comfy
        models = self.base / "models"
        folder = models / "diffusion_models" / "networks"
        lacking = [kind for kind in kinds or KINDS if not (models / KINDS[kind]).exists()]
        lacking += [name for name in networks if not (folder / f"{name}.safetensors").exists()]
        if lacking:
            command = [writer.python, "-m", "tests.zoo.files", models, *lacking]
            environment = {**os.environ, **_QUIET, "PYTHONPATH": SITE, "COMFYUI_PATH": str(writer.root)}
            subprocess.run(command, check=True, capture_output=True, cwd=OUR_ROOT, env=environment)

    def log(self, since: int = 0) -> str:
        return self.log_path.read_bytes()[since:].decode(errors="replace")

    def log_size(self) -> int:
        return self.log_path.stat().st_size

    def children(self) -> list[Process]:
        """Every process of ours except the server itself."""
        return [process for process in marked_processes(self.mark) if process.pid != self.process.pid]

    def workers(self) -> dict[int, Process]:
        """The rank processes, by rank."""
        return {process.rank: process for process in self.children() if process.rank is not None}

    def kill(self) -> None:
        """As the kernel would when memory runs out: no handler runs."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ctrl-C, as a user would; then look who has stayed behind, end them and say so."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        left = wait_until_none(self.mark, LEASH_SECONDS)
        for process in left:
            process.kill()
        if hasattr(self, "client"):
            self.client.close()
        assert not left, f"outlived their ComfyUI by {LEASH_SECONDS} s: {left}"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/queue", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextmanager
def running_server(
    comfy: ComfyInstall,
    *,
    flags: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    packs: tuple[Path, ...] = (),
) -> Iterator[Server]:
    """`packs` are folders of further custom nodes."""
    base = Path(tempfile.mkdtemp(prefix="cpc-"))  # short: unix sockets below it have 108 characters
    try:
        _furnish(base)
        for pack in packs:
            (base / "custom_nodes" / pack.name).symlink_to(pack)
        server = Server(comfy, base, flags=flags, env=env or {})
        try:
            server.wait_until_up()
            yield server
        except Exception as failure:
            failure.add_note(f"ComfyUI's log:\n{server.log()[-8000:]}")
            raise
        finally:
            server.stop()
    finally:
        shutil.rmtree(base)


def _furnish(base: Path) -> None:
    nodes, output = base / "custom_nodes", base / "output"
    nodes.mkdir()
    output.mkdir()  # ComfyUI makes input, user and temp, but not this one
    (nodes / "context-parallel-sampler").symlink_to(OUR_ROOT)
    (nodes / "cp_test_nodes").symlink_to(Path(__file__).absolute().parent / "rig_nodes")
    for name in ("cp_unimportable", "cp_fatal"):
        (nodes / name).symlink_to(Path(__file__).absolute().parent / "rig_unimportable")
    write_models(base / "models")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
