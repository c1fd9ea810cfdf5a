"""Workers of a later ComfyUI: what they must not share with it is off, or the group says by name why it does not start.

That version is the one that is here, with lines of a later one added.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from .comfy import OUR_ROOT, ComfyInstall
from .graphs import Job, sampling_graph
from .server import Server, running_server
from .test_kin import link, node

COMPILER = '\nparser.add_argument("--disable-comfy-compiler", action="store_true")\n'
START = """
import json, sys
from parallel_runtime.errors import ParallelError
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ComfySetup, Placement
try:
    WorkerGroup(Placement(devices=("cpu",)), ComfySetup(root=sys.argv[1], flags=tuple(sys.argv[2:]))).close()
except ParallelError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps(""))
"""
FLAGS = """
import json, sys, torch
from parallel_runtime.specs import ComfySetup
from parallel_runtime.worker.comfy_loop import import_comfyui
import_comfyui(ComfySetup(root=sys.argv[1], flags=tuple(sys.argv[2:])), torch.device("cpu"))
print(json.dumps(sys.argv))
"""
FAST = (
    FLAGS
    + """
from comfy.cli_args import args
print(json.dumps([sorted(feature.value for feature in args.fast), torch.backends.cudnn.benchmark]))
"""
)

GPU_FLAGS = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from parallel_runtime.specs import ComfySetup
from parallel_runtime.worker.comfy_loop import _flags
print(json.dumps(_flags(ComfySetup(root=sys.argv[1], flags=tuple(sys.argv[2:])), torch.device("cuda"))))
"""


def later(comfy: ComfyInstall, folder: Path, added: dict[str, str], flags: str = "") -> Path:
    """A ComfyUI in `folder` with lines `added` to modules of its package, and `flags` where it adds its own."""
    for path in comfy.root.iterdir():
        if path.name != "comfy":
            (folder / path.name).symlink_to(path)
    (folder / "comfy").mkdir()
    for path in (comfy.root / "comfy").iterdir():
        made = folder / "comfy" / path.name
        made.symlink_to(path) if path.is_dir() else shutil.copy(path, made)
    for name, lines in added.items():
        with (folder / "comfy" / name).open("a") as file:
            file.write(lines)
    arguments = folder / "comfy" / "cli_args.py"
    text, parsing = arguments.read_text(), "\nif comfy.options.args_parsing:"
    assert parsing in text
    arguments.write_text(text.replace(parsing, f"{flags}{parsing}", 1))
    return folder


def answer(comfy: ComfyInstall, script: str, root: Path, flags: Sequence[str] = ()) -> str | list[str]:
    command = [str(comfy.python), "-c", script, str(root), *flags]
    done = subprocess.run(command, cwd=OUR_ROOT, capture_output=True, text=True, timeout=180)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (
            {"memory_management.py": "\naimdo_enabled = True\n"},
            "has dynamic VRAM on in a worker.*--disable-dynamic-vram",
        ),
        pytest.param(
            {"model_patcher.py": "\nCoreModelPatcher = ModelPatcherDynamic\n"},
            "has dynamic VRAM on in a worker",
            marks=pytest.mark.sweep,
        ),
        ({"cli_args.py": "\nargs.disable_comfy_compiler = False\n"}, "has its model compiler on in a worker"),
    ],
    ids=["memory", "patcher", "compiler"],
)
@pytest.mark.sweep
def test_a_version_that_insists_is_refused_by_name(
    comfy: ComfyInstall, tmp_path: Path, added: dict[str, str], says: str
) -> None:
    output = answer(comfy, START, later(comfy, tmp_path, added))
    assert isinstance(output, str)
    assert re.search(f"could not start: Refused: ComfyUI .* {says}", output), output


def test_flags_that_this_version_does_not_know_are_not_passed(comfy: ComfyInstall) -> None:
    text = (comfy.root / "comfy" / "cli_args.py").read_text()
    given = answer(comfy, FLAGS, comfy.root)
    for flag in ("--disable-comfy-compiler", "--disable-dynamic-vram"):
        assert (flag in given) == (f'"{flag}"' in text)


def test_what_workers_do_not_share_is_off_whatever_a_user_chose_for_comfyui(
    comfy: ComfyInstall, tmp_path: Path
) -> None:
    root = later(comfy, tmp_path, {}, COMPILER)
    flags = ["--enable-dynamic-vram", "--cuda-malloc", "--disable-comfy-compiler", "--force-fp32"]
    given = answer(comfy, FLAGS, root, flags)
    assert given == ["main.py", "--cpu", "--force-fp32", "--disable-dynamic-vram", "--disable-comfy-compiler"]


@pytest.mark.parametrize("flag", ["--highvram", "--gpu-only", "--normalvram", "--lowvram", "--novram"])
def test_workers_on_gpus_place_weights_whatever_comfyui_does_with_its_own(comfy: ComfyInstall, flag: str) -> None:
    """With --highvram a worker loaded what it should keep in main memory to its GPU, and "offload" freed nothing."""
    given = answer(comfy, GPU_FLAGS, comfy.root, [flag, "--force-fp16"])
    assert flag not in given
    assert given[0] == "--force-fp16"


def test_a_newer_comfyui_says_once_that_it_is_untested_and_refuses_nothing(comfy: ComfyInstall, tmp_path: Path) -> None:
    root = later(comfy, tmp_path, {})
    for name, text in (
        ("main.py", (comfy.root / "main.py").read_text()),
        ("comfyui_version.py", '__version__ = "0.46.1"'),
    ):
        (root / name).unlink()  # Python looks for modules beside the file that a link is to
        (root / name).write_text(text)
    says = re.compile(r"Tested up to ComfyUI 0\.\d+, and this is 0\.46:")
    with running_server(replace(comfy, root=root)) as server:
        graph = sampling_graph(Job(family="flux_dev", steps=1), "CPSampler")
        graph["plan"] = node("CPPlan", model=link("model"), latent_image=link("latent"), positive=link("positive"))
        graph["sampler"]["inputs"]["cp_config"] = link("plan", 1)
        run = server.client.run(graph)
        assert len(says.findall(server.log())) == 1
        assert len(says.findall(run.outputs["plan"]["text"][0])) == 1
        assert server.client.get("/cp/status")["untested"]["values"]["found"] == "0.46"


def test_a_tested_comfyui_says_nothing_of_it(server: Server) -> None:
    assert server.client.get("/cp/status")["untested"] == ""
    assert "Tested up to" not in server.log()


@pytest.mark.parametrize("chosen", [[], ["autotune", "cublas_ops"]], ids=["all", "two"])
def test_ranks_do_not_time_convolutions_each_for_itself(comfy: ComfyInstall, tmp_path: Path, chosen: list[str]) -> None:
    """With --fast, as a ComfyUI understands it that acts on the flag at import. Its other parts stay."""
    at_import = "\ntorch.backends.cudnn.benchmark = PerformanceFeature.AutoTune in args.fast\n"
    root = later(comfy, tmp_path, {"model_management.py": at_import})
    features, benchmark = answer(comfy, FAST, root, ["--fast", *chosen])
    assert not benchmark
    assert "autotune" not in features
    assert "cublas_ops" in features
