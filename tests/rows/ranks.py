"""The process that VAE tests push cases through, in ComfyUI's python: `python -m tests.rows.ranks COMFYUI`.

Requests are JSON lines [case, method, dim, ranks, options], answers JSON lines. The VAE runs whole here; then so many
ranks are forked, which share its weights, and each compares its rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 100.0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(1)
    sys.path.append(sys.argv[1])
    sys.argv[1:] = ["--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from . import cases

    for line in sys.stdin:
        try:
            answer = {"value": cases.run(*json.loads(line), divide)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def divide(world: int, work: Any) -> list[Any]:
    """What `work(rank)` returns on each of so many forked gloo ranks. Raises what one of them said."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = {_fork(rank, world, folder, work): rank for rank in range(world)}
        deadline, failed = time.monotonic() + LIMIT, False
        while ranks and not failed and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            failed = bool(ranks.pop(pid, None) is not None and status)
            time.sleep(0 if pid else 0.01)
        time.sleep(0.3 if failed else 0)
        for pid in ranks:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        if failed or ranks:
            messages = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
            raise RuntimeError("\n".join(messages) or "ranks hang")
        return [torch.load(f"{folder}/answer{rank}") for rank in range(world)]


def _fork(rank: int, world: int, folder: str, work: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        with torch.inference_mode():
            torch.save(work(rank), f"{folder}/answer{rank}")
        dist.barrier()
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
