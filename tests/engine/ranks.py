"""The process that tests push cases through: imports the modules of cases once, then forks groups of gloo ranks.

    python -m tests.engine.ranks MODULE ...

Requests and answers are JSON lines, [world, case, arguments] in and [{"value": ...} or {"error": ...}, ...] out.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_LIMIT = 60.0


class Group:
    """`world` ranks with one process group, which lasts for the whole session."""

    def __init__(self, world: int, directory: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, f"{directory}/store{world}", theirs)
            context.Process(target=_serve, args=arguments, daemon=True).start()
            self._pipes.append(ours)

    def run(self, case: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all ranks; a rank that is late answers with an error, and the group is of no use any more."""
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps([case, arguments]).encode())
        deadline = time.monotonic() + _LIMIT
        return [_answer(pipe, deadline - time.monotonic()) for pipe in self._pipes]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(1)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    groups: dict[int, Group] = {}
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            world, case, arguments = json.loads(line)
            if world not in groups:
                groups[world] = Group(world, directory)
            print(json.dumps(groups[world].run(case, arguments)), file=answers, flush=True)


def _answer(pipe: Connection, limit: float) -> dict[str, Any]:
    try:
        return json.loads(pipe.recv_bytes()) if pipe.poll(max(limit, 0.01)) else {"error": "no answer in time"}
    except (EOFError, ConnectionError):
        return {"error": "the rank died"}


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "cpu:gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    while True:
        case, arguments = json.loads(pipe.recv_bytes())
        module, function = case.split(":")
        try:
            answer = {"value": getattr(importlib.import_module(module), function)(rank, world, **arguments)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
