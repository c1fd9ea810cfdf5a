"""All tests in two runs of pytest at a time, and mypy: `python -m tests.beside`, for two cores.

Most tests wait, for a process that starts or for the slower of two ranks, and leave a core idle. What keeps no time
runs there, and gives way to the others.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .comfyui.processes import die_with_parent

BESIDE = (
    "tests/bench",
    "tests/comfyui/test_formats.py",
    "tests/comfyui/test_lora.py",
    "tests/comfyui/test_networks.py",
    "tests/comfyui/test_parity.py",
    "tests/comfyui/test_patch_models.py",
    "tests/comfyui/test_shares.py",
    "tests/comfyui/test_undivided.py",
    "tests/comfyui/test_whole.py",
    "tests/engine",
    "tests/gpu",
    "tests/networks",
    "tests/vae",
    "tests/test_architecture.py",
    "tests/test_demo_codec.py",
    "tests/test_demo_model.py",
    "tests/test_demo_transformer.py",
    "tests/test_for_diffusers.py",
    "tests/test_machine_report.py",
    "tests/test_recorded.py",
    "tests/test_step_cache.py",
)
PYTEST = (sys.executable, "-m", "pytest", "-q")
MYPY = (sys.executable, "-m", "mypy", "parallel_runtime", "nodes")
NICE = 5  # a quarter of a core where the others want all of it: groups of ranks still hear of each other in time


def both(first: Sequence[str], *second: Sequence[str]) -> int:
    """Run `first`, and beside it the commands of `second` up to one that fails. What these say is told at the end.

    Returns 0, or how one of them failed.
    """
    with tempfile.TemporaryFile() as said, _beside(second, said) as beside:
        codes = subprocess.run(first).returncode, beside.wait()
        said.seek(0)
        sys.stdout.write(said.read().decode(errors="replace"))
    return next(filter(None, codes), 0)


@contextmanager
def _beside(commands: Sequence[Sequence[str]], said: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """However we end, they do too."""
    *before, last = map(shlex.join, commands)
    script = " && ".join([*before, f"exec {last}"])
    process = subprocess.Popen(
        ["bash", "-c", script], stdout=said, stderr=said, start_new_session=True, preexec_fn=_give_way
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()


def _give_way() -> None:
    """Where Linux shares the cores out to sessions, it goes by what each of them says here."""
    die_with_parent()
    os.nice(NICE)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))


if __name__ == "__main__":
    sys.exit(both([*PYTEST, *(f"--ignore={path}" for path in BESIDE)], MYPY, [*PYTEST, *BESIDE]))
