"""The command line of the workbench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import check, draft


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m parallel_runtime networks", description=__doc__)
    parser.add_argument(
        "action", choices=("draft", "check"), help="print a plan's first draft, or try the plan there is"
    )
    parser.add_argument(
        "subject", type=Path, help="a file with network() and inputs(rows=0, text=0), see networks/README.md"
    )
    parser.add_argument("--comfyui", type=Path, default=Path(), help="a checkout of ComfyUI")
    told = parser.parse_args(arguments)
    if told.action == "draft":
        sys.stdout.write(draft.draft(told.subject, told.comfyui))
        return 0
    return check.check(told.subject, told.comfyui)
