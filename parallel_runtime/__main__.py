"""python -m parallel_runtime demo | join HOST:PORT | migrate WORKFLOW.json | packs | report"""

import importlib
import sys

OLDEST_PYTHON = (3, 11)
MOVED = {"networks": "tests.networks"}

if __name__ == "__main__":
    if sys.version_info < OLDEST_PYTHON:
        version = "{}.{}".format(*sys.version_info)
        sys.exit(f"this needs Python 3.11 or newer, such as ComfyUI's own, and {sys.executable} is Python {version}")
    from .commands import COMMANDS  # which an older Python does not understand
    from .demo import REQUIREMENTS

    name = [*sys.argv[1:], ""][0]
    if name not in COMMANDS:
        listing = "".join(f"\n  {name:10}{purpose}" for name, (_, purpose, _) in COMMANDS.items())
        usage = f"usage: python -m parallel_runtime {{{','.join(COMMANDS)}}} [--help]{listing}"
        if sys.argv[1:] in (["--help"], ["-h"]):
            sys.exit(sys.stdout.write(f"{usage}\n") and 0)
        unknown = f"there is no command {name!r}\n" if name else ""
        if name in MOVED:
            unknown = f"{name} is for developers, who run it as python -m {MOVED[name]}\n"
        sys.exit(unknown + usage)
    module, _, parsed = COMMANDS[name]
    options = parsed(sys.argv[2:])
    try:
        command = importlib.import_module(f".commands.{module}", __package__)
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "diffusers", "safetensors"):
            raise
        install = f"{sys.executable} -m pip install torch -r {REQUIREMENTS}"
        sys.exit(
            f"{missing.name} is not installed for {sys.executable}. Use ComfyUI's Python, or install what is needed: "
            f"{install}"
        )
    sys.exit(command.main(options))
