"""python -m parallel_runtime demo [options], join HOST:PORT [options], or migrate WORKFLOW.json [options]"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "demo": ".demo.run",
    "join": ".host.join",
    "migrate": ".migrate",
}  # imported when asked for: each wants other packages

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit("usage: python -m parallel_runtime {demo,join,migrate} [--help]")
    sys.exit(importlib.import_module(COMMANDS[sys.argv[1]], __package__).main(sys.argv[2:]))
