"""A ComfyUI that was closed leaves nothing of ours: no process, no temporary file, no shared memory."""

from __future__ import annotations

from .cases import DEGREES
from .comfy import ComfyInstall
from .graphs import Job, longer, sampling_graph
from .processes import named_shared_files, wait_until_none
from .server import LEASH_SECONDS, running_server

FLUX = Job(family="flux_dev", cfg=2.0)


def test_a_closed_comfyui_leaves_nothing_behind(comfy: ComfyInstall) -> None:
    with running_server(comfy) as server:
        before, since = set(server.scratch.rglob("*")), server.client.now()
        prompt = server.client.queue(sampling_graph(longer(FLUX, steps=10), "CPSampler", DEGREES["ring_2"]))
        server.client.wait_for_step(3, since=since)
        held = named_shared_files(server.children())
        server.client.finish(prompt, since=since)
        server.stop()
        assert wait_until_none(server.mark, LEASH_SECONDS) == []
        assert set(server.scratch.rglob("*")) - before == set(), "in the server's and the workers' TMPDIR"
        ours = {path for path in held if server.base / "models" not in path.parents and path != server.log_path}
        assert {path for path in ours if path.exists()} == set()
