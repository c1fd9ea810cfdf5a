"""python -m parallel_runtime.worker SOCKET, started by torchrun once a rank.

Each worker's stdout and stderr go into a FIFO of its own in the group's folder, so no line has to name its rank."""

import os
import sys

from .agent import AGENT_PID, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(os.environ[AGENT_PID]))
    printed = os.open(os.path.join(os.environ["CP_FOLDER"], f"output-{os.environ['RANK']}"), os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    # Our folders `nodes` and `tests` must not hide ComfyUI's modules of the same names; we import ourselves relatively.
    sys.path.remove(os.getcwd())
    from .serve import main

    main(sys.argv[1])
