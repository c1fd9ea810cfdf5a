"""A rank's share of one evaluation at 2, 4 and 8 ranks, in a group that delivers nothing; diffusers' own beside it.

    python -m tests.bench.share [--devices cpu] [--comfyui FOLDER] [--minutes 10] [--out share]

The two parts of `python -m parallel_runtime report` that say it, alone. On the CPU networks are tiny.
"""

from __future__ import annotations

import sys

from parallel_runtime.report.command import main

if __name__ == "__main__":
    sys.exit(main(["--only", "share", "diffusers_own", "--out", "share", *sys.argv[1:]]))
