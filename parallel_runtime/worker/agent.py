"""torchrun on a leash: `python -m parallel_runtime.worker.agent <torchrun arguments>`, the host holding our stdin.

torchrun's agent survives its parent and, killed, leaves its workers running; the leash is what ends both.
"""

import os
import runpy
import shutil
import sys

from .leash import die_when

AGENT_PID = "CP_AGENT_PID"

if __name__ == "__main__":
    # A host that was killed could not remove the group's private folder.
    die_when(lambda: os.read(sys.stdin.fileno(), 1), lambda: shutil.rmtree(os.environ["CP_FOLDER"], ignore_errors=True))
    os.environ[AGENT_PID] = str(os.getpid())
    from .rendezvous import register  # the leash must be armed before torch is imported

    register()
    sys.argv[0] = "torchrun"
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
