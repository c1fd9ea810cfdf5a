"""What another ComfyUI changes for us, beyond what was judged for the one that we are tested with:

    python -m tests.comfyui.judge --comfyui PATH [--write]

Runs nothing; a line a difference, and exit code 1 where there is one. CONTRIBUTING.md says what to do with each.
--write: what its networks do is judged from now on (judged_networks.json).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from . import judged
from .comfy import ComfyInstall, install_at
from .names import missing_names
from .networks_of import Found, networks_of
from .reads import read_by

log = logging.getLogger(__name__)

NETWORKS = Path(__file__).with_name("judged_networks.json")


def differences(comfy: ComfyInstall) -> list[str]:
    """A line for each thing that this ComfyUI does otherwise than was judged."""
    known: Found = json.loads(NETWORKS.read_text(encoding="utf-8"))
    found = networks_of(comfy)
    lines = [f"name that we use: gone: {name}" for name in missing_names(comfy.root)]
    for what, keys in read_by(comfy.root).items():
        lines += changes(f"judged.{what}", dict.fromkeys(getattr(judged, what), ""), dict.fromkeys(keys, ""))
    for what in sorted(known.keys() | found.keys()):
        lines += changes(what, known.get(what, {}), found.get(what, {}))
    return lines


def changes(what: str, before: dict[str, str], now: dict[str, str]) -> list[str]:
    new = [f"{what}: new: {name} {now[name]}".rstrip() for name in sorted(now.keys() - before.keys())]
    gone = [f"{what}: gone: {name}" for name in sorted(before.keys() - now.keys())]
    return [*new, *gone, *(f"{what}: changed: {key}" for key in sorted(now) if before.get(key, now[key]) != now[key])]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.comfyui.judge", description=__doc__)
    parser.add_argument("--comfyui", required=True, type=Path, metavar="PATH", help="a checkout")
    parser.add_argument("--write", action="store_true", help="its networks are judged")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    comfy = install_at(asked.comfyui)
    if asked.write:
        NETWORKS.write_text(json.dumps(networks_of(comfy), indent=1) + "\n", encoding="utf-8")
        return 0
    lines = differences(comfy)
    log.info("ComfyUI %s differs from what was judged in %d things", comfy.version, len(lines))
    for line in lines:
        log.info("%s", line)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
