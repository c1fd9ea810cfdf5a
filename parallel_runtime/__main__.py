"""python -m parallel_runtime demo | join HOST:PORT | migrate WORKFLOW.json | packs | report"""

import importlib
import sys

from .demo import REQUIREMENTS

# A command is imported when it is called: each needs other packages.
COMMANDS = {
    "demo": (".commands.demo_run", "draw a picture with the small model of this pack"),
    "join": (".commands.join", "lend this machine's devices to a ComfyUI on another"),
    "migrate": (".commands.migrate", "convert a saved workflow to CP samplers, or back with --back"),
    "packs": (".commands.installed_packs", "try which packs of custom nodes workers can import, and what it costs"),
    "report": (".commands.report", "measure what this machine can do"),
}
MOVED = {"networks": "tests.networks"}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        listing = "".join(f"\n  {name:10}{purpose}" for name, (_, purpose) in COMMANDS.items())
        usage = f"usage: python -m parallel_runtime {{{','.join(COMMANDS)}}} [--help]{listing}"
        if sys.argv[1:] in (["--help"], ["-h"]):
            sys.exit(sys.stdout.write(f"{usage}\n") and 0)
        unknown = f"there is no command {sys.argv[1]!r}\n" if len(sys.argv) > 1 else ""
        if len(sys.argv) > 1 and sys.argv[1] in MOVED:
            unknown = f"{sys.argv[1]} is for developers, who run it as python -m {MOVED[sys.argv[1]]}\n"
        sys.exit(unknown + usage)
    try:
        command = importlib.import_module(COMMANDS[sys.argv[1]][0], __package__)
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "diffusers", "safetensors"):
            raise
        install = f"{sys.executable} -m pip install torch -r {REQUIREMENTS}"
        sys.exit(
            f"{missing.name} is not installed for {sys.executable}. Use ComfyUI's Python, or install what is needed: "
            f"{install}"
        )
    sys.exit(command.main(sys.argv[2:]))
