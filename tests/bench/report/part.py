"""A part of the report in processes of its own: what starts them, passes their measurements on and ends them in time,
and what each of them does.

    python -m tests.bench.report.part PART SETTING

One rank, or the process that has the workers of a part: it measures the `cases` of the module PART, and writes each
measurement down at once, a line of JSON. SETTING is JSON too. `networks check` starts ranks by it too.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_runtime.accelerators import environment
from parallel_runtime.engine.comm.ranks import ONE_CARD, empty_cache, join, rank
from parallel_runtime.worker.agent import die_with_parent
from parallel_runtime.worker.comfy_loop import import_comfyui

from .measuring import REMAINING_CASES, Measurement, Setting, measurement_of, unbroken

ROOT = Path(__file__).resolve().parents[3]
FOLDER, PARENT = "REPORT_FOLDER", "REPORT_PARENT"
MEASUREMENTS, OUTPUT, STORE = "measurements", "output", "store"  # files in FOLDER
GRACE_SECONDS = 5.0  # for the other ranks to end after one has failed
WORDS = 600  # characters of a process' last output


def measurements_of(part: str, setting: Setting, *, processes: int, seconds: float) -> Iterator[Measurement]:
    """Yields what `processes` ranks measure; where they fail, or their time is over, a last measurement says so."""
    with tempfile.TemporaryDirectory() as name, Path(name, MEASUREMENTS).open("w+") as file:
        folder = Path(name)
        ranks = [_start(part, setting, rank, processes, folder) for rank in range(processes)]
        deadline, failed = time.monotonic() + seconds, False
        try:
            while (running := any(each.poll() is None for each in ranks)) and time.monotonic() < deadline:
                if not failed and any(each.poll() for each in ranks):
                    deadline, failed = min(deadline, time.monotonic() + GRACE_SECONDS), True
                yield from map(json.loads, file)
                time.sleep(0.05)
        finally:
            for each in ranks:
                if each.poll() is None:
                    os.killpg(each.pid, signal.SIGKILL)
        yield from map(json.loads, file)
        codes = [each.wait() for each in ranks]
        if running and not failed:
            note = f"not measured for lack of time: it was given {seconds:.0f} s, which are over; or it hangs"
            yield {"what": REMAINING_CASES, "note": note}
        elif any(codes):
            last = " ".join((folder / OUTPUT).read_text()[-WORDS:].split())
            ended = ", ".join(f"rank {rank} with {code}" for rank, code in enumerate(codes) if code)
            yield {"what": REMAINING_CASES, "failed": f"processes ended: {ended}: {last}"}


def _start(part: str, setting: Setting, rank: int, world_size: int, folder: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    variables = {name: str(value) for name, value in place.items()} | {FOLDER: str(folder), PARENT: str(os.getpid())}
    variables |= {ONE_CARD: "1"} if setting.one_card else {}
    variables |= {"NCCL_GRAPH_REGISTER": "1"} if setting.registered else {}
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    with (folder / OUTPUT).open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", _from_root(f"{__package__}.part"), _from_root(part), json.dumps(asdict(setting))],
            cwd=ROOT,
            env=os.environ | environment("lo") | defaults | variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _from_root(module: str) -> str:
    """Returns a module's name in ROOT: pytest names it in the folder above, as this is a package there."""
    return module[module.index("tests.") :]


def main(name: str, setting: Setting) -> None:
    folder = Path(os.environ[FOLDER])
    device = torch.device(setting.devices[rank()])
    join(device, str(folder / STORE), through_main_memory=setting.one_card)
    part = importlib.import_module(name)
    if setting.comfyui:
        import_comfyui(setting.comfy, device)
    with torch.inference_mode():
        for case in unbroken({"what": REMAINING_CASES}, part.cases(setting, device)):
            measurement = measurement_of(case)
            if rank() == 0:
                with (folder / MEASUREMENTS).open("a") as file:
                    file.write(json.dumps(measurement) + "\n")
            gc.collect()  # of the next one there would be no room beside what this one held
            empty_cache(device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT]))  # it may be killed, or its terminal closed
    sys.path.remove(os.getcwd())  # our folders `nodes` and `tests` must not hide ComfyUI's modules of the same names
    main(sys.argv[1], Setting(**json.loads(sys.argv[2])))
