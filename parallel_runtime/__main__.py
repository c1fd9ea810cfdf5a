"""python -m parallel_runtime demo | join HOST:PORT | migrate WORKFLOW.json | networks draft|check FILE"""

from __future__ import annotations

import importlib
import sys

# Imported when asked for: each wants other packages.
COMMANDS = {
    "demo": ".demo.run",
    "join": ".host.join",
    "migrate": ".migrate",
    "networks": ".worker.workbench.command",
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m parallel_runtime {{{','.join(COMMANDS)}}} [--help]")
    sys.exit(importlib.import_module(COMMANDS[sys.argv[1]], __package__).main(sys.argv[2:]))
