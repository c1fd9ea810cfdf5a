"""The ways of docs/scripts.md to run a workflow without the page, after migrate has put a CP node into it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from .client import FinishedPrompt, Graph
from .comfy import OUR_ROOT
from .graphs import Job, longer, sampling_graph
from .latents import apart, latent_of
from .server import Server

JOB = longer(Job(family="flux_schnell"), steps=8)


PAGE = (OUR_ROOT / "docs" / "scripts.md").read_text()


def script(server: Server) -> str:
    """The page's only block of Python, with this server's address in it."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "http://127.0.0.1:8188" in block
    return block.replace("8188", str(server.port))


def migrated(graph: Graph, folder: Path) -> Path:
    """What the command makes of a saved workflow."""
    path = folder / "my_workflow.json"
    path.write_text(json.dumps(graph))
    command = [sys.executable, "-m", "parallel_runtime", "migrate", str(path)]
    subprocess.run(command, cwd=OUR_ROOT, check=True, timeout=60)
    return folder / "my_workflow.cp.json"


def test_migrate_then_run_gives_natives_latent_and_saves_the_picture(server: Server, tmp_path: Path) -> None:
    graph = sampling_graph(JOB, "KSampler")
    native = latent_of(server.client.run(graph))
    grey = {"width": 16, "height": 8, "batch_size": 1, "color": 0x808080}
    graph["grey"] = {"class_type": "EmptyImage", "inputs": grey}
    graph["shown"] = {"class_type": "PreviewImage", "inputs": {"images": ["grey", 0]}}
    line = [sys.executable, "-c", script(server), str(migrated(graph, tmp_path)), f"http://localhost:{server.port}"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=True)
    (picture,) = tmp_path.glob("*.png")
    assert Image.open(picture).size == (16, 8)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("success ")
    run = FinishedPrompt(outputs=json.loads(last.removeprefix("success ")), events=(), seconds=0)
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
    assert "ring_degree 3" in done.stdout, "why"


def test_a_workflow_as_the_page_saves_it_is_refused_in_a_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "workflow.json").write_text(json.dumps({"nodes": [], "links": []}))
    line = [sys.executable, "-c", script(server), "workflow.json"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == "workflow.json is as the page saves it; this needs the workflow from File > Export (API)\n"


def test_the_script_is_short_and_needs_nothing(server: Server) -> None:
    lines = [line for line in script(server).splitlines() if line]
    assert len(lines) <= 23
    (imported,) = (line for line in lines if "import" in line)
    assert {name.strip().partition(".")[0] for name in imported.removeprefix("import").split(",")} <= set(
        sys.stdlib_module_names
    )


def test_comfyuis_own_command_runs_it(server: Server, tmp_path: Path) -> None:
    if (comfy := os.environ.get("COMFY_CLI") or shutil.which("comfy", path=search_path())) is None:
        pytest.skip("NO COMFY-CLI: .venv/bin/pip install comfy-cli (or set COMFY_CLI to its path)")
    graph = sampling_graph(JOB, "KSampler")
    native = latent_of(server.client.run(graph))
    migrated(graph, tmp_path)
    (documented,) = (line for line in PAGE.splitlines() if line.startswith("comfy "))
    line = [comfy, *shlex.split(documented.replace("8188", str(server.port)).replace("/path/to", str(tmp_path)))[1:]]
    env = {**os.environ, "HOME": str(tmp_path), "DO_NOT_TRACK": "1"}  # it keeps a note of every job
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = server.client.get("/history?max_items=1").values()
    assert apart(latent_of(FinishedPrompt(outputs=job["outputs"], events=(), seconds=0)), native) <= 1e-4
    assert "CPSampler" in {call["class_type"] for call in job["prompt"][2].values()}


def search_path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
