"""python -m parallel_runtime demo [options]"""

from __future__ import annotations

import sys

from .demo.run import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["demo"]:
        sys.exit("usage: python -m parallel_runtime demo [--help]")
    sys.exit(main(sys.argv[2:]))
