"""The command `packs` tries each pack as a worker would, and outlives all of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.commands.installed_packs import in_lines

from .comfy import OUR_ROOT, ComfyInstall

SECONDS = 20.0
REPLACES = """
import importlib, torch, comfy.k_diffusion.sampling, comfy.samplers
def mine(*args, **kwargs): pass
comfy.samplers.get_area_and_mult = torch.nn.functional.scaled_dot_product_attention = torch.nn.GroupNorm.forward = mine
importlib.reload(comfy.k_diffusion.sampling)
"""
PACKS = {
    "good/__init__.py": "from . import nodes\nDATA = bytearray(30_000_000)\nprint('[good] loaded')",
    "good/nodes.py": "def a(m): m.set_model_sampler_post_cfg_function(a)\ndef b(m): m.add_object_patch('x', 1)",
    "broken/__init__.py": "import not_there",
    "no_python/__init__.py": "this is no Python",
    "empty/readme.txt": "",
    "ends.py": "import os\nos._exit(7)",
    "crashes/__init__.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hangs/__init__.py": "import subprocess, time\nsubprocess.Popen(['sleep', '987'])\ntime.sleep(1000)",
    "watches/__init__.py": "import threading, time\nthreading.Thread(None, time.sleep, 'watcher', (1000,)).start()",
    "replaces/__init__.py": REPLACES,
    "off.disabled/__init__.py": "raise RuntimeError",
}  # fmt: skip


@pytest.fixture(scope="module")
def packs(comfy: ComfyInstall, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the command says of each pack."""
    base = tmp_path_factory.mktemp("base")
    (base / "custom_nodes").mkdir()
    (base / "custom_nodes" / "context-parallel-sampler").symlink_to(OUR_ROOT)
    for name, source in PACKS.items():
        file = base / "custom_nodes" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    command = [comfy.python, "-m", "parallel_runtime", "packs", "--json", "--timeout", f"{SECONDS}"]
    command += ["--comfyui", comfy.root, "--", "--base-directory", base]
    done = subprocess.run(command, cwd=OUR_ROOT, capture_output=True, text=True, timeout=600, check=True)
    return {row["pack"]: row for row in json.loads(done.stdout)}


def test_a_good_pack_is_imported_and_its_cost_and_what_it_puts_on_models_are_named(packs: dict[str, Any]) -> None:
    good = packs["good"]
    assert good["imports"], good
    assert good["puts"] == ["post-CFG functions", "object patches"]
    assert good["replaces"] == good["threads"] == []
    assert 25 < good["mb"] < 45
    assert 0 < good["seconds"] < SECONDS


def test_every_pack_that_comfyui_imports_is_tried_and_no_other(packs: dict[str, Any]) -> None:
    assert set(packs) == {Path(name).parts[0] for name in PACKS} - {"off.disabled"}


@pytest.mark.parametrize(
    ("pack", "reason"),
    [
        ("broken", "ModuleNotFoundError: No module named 'not_there'"),
        ("no_python", "SyntaxError"),
        ("empty", "__init__.py"),
        ("ends.py", "exit code 7"),
        ("crashes", "exit code -11"),
        ("hangs", f"had not ended after {SECONDS:.0f} s"),
    ],
)
def test_a_pack_that_cannot_be_imported_says_why(packs: dict[str, Any], pack: str, reason: str) -> None:
    assert not packs[pack]["imports"]
    assert reason in packs[pack]["reason"]


def test_what_a_pack_that_hangs_has_started_is_gone(packs: dict[str, Any]) -> None:
    left = [line for line in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
            .stdout.splitlines() if line == "sleep 987"]  # fmt: skip
    assert packs["hangs"]
    assert left == []


def test_a_thread_that_an_import_starts_is_named(packs: dict[str, Any]) -> None:
    assert packs["watches"]["imports"]
    assert packs["watches"]["threads"] == ["watcher"]


def test_what_an_import_replaces_is_named_and_a_reload_is_nothing(packs: dict[str, Any]) -> None:
    assert set(packs["replaces"]["replaces"]) == {
        "comfy.samplers.get_area_and_mult",
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.nn.modules.normalization.GroupNorm.forward",
    }


def test_the_table_has_a_line_for_each_pack_and_its_reason_below(packs: dict[str, Any]) -> None:
    heading, *lines = in_lines(iter(packs.values()))
    assert "import" in heading
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [*packs]
    (good,) = [line for line in lines if line.startswith("good ")]
    assert good.endswith("post-CFG functions, object patches; nothing")
    assert any("No module named 'not_there'" in line for line in lines)
    assert any("watcher" in line for line in lines)


def test_a_folder_without_comfyui_is_refused_in_one_sentence(comfy: ComfyInstall, tmp_path: Path) -> None:
    command = [comfy.python, "-m", "parallel_runtime", "packs"]
    environment = {name: value for name, value in os.environ.items() if name != "COMFYUI_PATH"}
    done = subprocess.run(
        command, cwd=OUR_ROOT, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 1
    assert done.stdout == "this needs ComfyUI: --comfyui names its folder\n"
