"""A ComfyUI that ends while it samples leaves nothing of ours: no process, no temporary file, no shared memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from .cases import DEGREES
from .comfy import ComfyInstall
from .graphs import Job, longer, sampling_graph
from .processes import named_shared_files, wait_until_none
from .server import LEASH_SECONDS, Server, running_server

LONG = longer(Job(family="flux_dev", cfg=2.0), steps=2000)


def interrupt(server: Server) -> None:
    """Ctrl-C."""
    server.stop()


def kill_the_whole_process_group(server: Server) -> None:
    """As a terminal or a service manager that has lost patience."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("end", [interrupt, kill_the_whole_process_group], ids=["Ctrl-C", "kill -9 of its group"])
def test_a_comfyui_that_ends_while_it_samples_leaves_nothing_behind(
    comfy: ComfyInstall, end: Callable[[Server], None]
) -> None:
    with running_server(comfy) as server:
        before, since = set(server.scratch.rglob("*")), server.client.now()
        server.client.queue(sampling_graph(LONG, "CPSampler", DEGREES["ring_2"]))
        server.client.wait_for_step(3, since=since)
        assert len(server.workers()) == 2
        shared_files = named_shared_files(server.children())
        end(server)
        assert wait_until_none(server.mark, LEASH_SECONDS) == []
        assert set(server.scratch.rglob("*")) - before == set(), "in the server's and the workers' TMPDIR"
        ours = {path for path in shared_files if server.base / "models" not in path.parents and path != server.log_path}
        assert {path for path in ours if path.exists()} == set()
