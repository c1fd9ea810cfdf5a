"""The README's script runs a workflow without ComfyUI's page, after the migrate command has put a CP node into it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from .client import Run
from .comfy import OUR_ROOT
from .graphs import Job, longer, sampling_graph
from .latents import apart, latent_of
from .server import Server

JOB = longer(Job(family="flux_schnell"), steps=8)


def script(server: Server) -> str:
    """The README's only block of Python, with this server's address in it."""
    (block,) = re.findall(r"```python\n(.*?)```", (OUR_ROOT / "README.md").read_text(), re.DOTALL)
    assert "http://127.0.0.1:8188" in block
    return block.replace("8188", str(server.port))


def test_migrate_then_run_gives_natives_latent(server: Server, tmp_path: Path) -> None:
    graph = sampling_graph(JOB, "KSampler")
    native = latent_of(server.client.run(graph))
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph))
    command = [sys.executable, "-m", "parallel_runtime", "migrate", str(path)]
    subprocess.run(command, cwd=OUR_ROOT, check=True, timeout=60)
    line = [sys.executable, "-c", script(server), str(tmp_path / "workflow.cp.json")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=180, check=True)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("success ")
    run = Run(outputs=json.loads(last.removeprefix("success ")), events=(), seconds=0)
    assert apart(latent_of(run), native) <= 1e-4


def test_a_failed_run_is_told_by_the_exit_code(server: Server, tmp_path: Path) -> None:
    graph = sampling_graph(JOB, "CPSampler")
    graph["config"] = {"class_type": "CPParallelConfig", "inputs": {"ring_degree": 3, "ulysses_degree": 1,
                       "rotate_method": "alltoall", "convert_to_fp32": True, "attention_backend": "auto",
                       "dtype": "auto", "devices": "cpu,cpu"}}  # fmt: skip
    graph["sampler"]["inputs"]["cp_config"] = ["config", 0]
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph))
    line = [sys.executable, "-c", script(server), str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("error ")
