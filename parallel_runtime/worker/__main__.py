"""python -m parallel_runtime.worker SOCKET, started by torchrun once a rank."""

import os
import sys

from .agent import AGENT_PID
from .leash import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(os.environ[AGENT_PID]))
    # Our folders `nodes` and `tests` must not hide ComfyUI's modules of the same names; we import ourselves relatively.
    sys.path.remove(os.getcwd())
    from .serve import main

    main(sys.argv[1])
