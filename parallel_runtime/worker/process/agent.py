"""Runs torchrun until the host ends: `python -m parallel_runtime.worker.process.agent REPORT <torchrun arguments>`. The
host has the other end of stdin; REPORT is the descriptor of a pipe for the causes of workers' deaths.

torchrun's agent survives its parent and, when killed, leaves its workers running; leash.py ends both.
"""

import os
import shutil
import sys
from multiprocessing.connection import Connection

from .leash import die_when

AGENT_PID = "CP_AGENT_PID"


def main(report: Connection) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from ...engine.comm.rendezvous import register
    from ...errors import Cause
    from ...wire.messages import Ended, encode

    register()
    try:
        torchrun()
    except ChildFailedError as failed:
        causes = [
            Cause(kind="killed", rank=rank, signal=failure.signal_name())
            if failure.exitcode < 0
            else Cause(kind="exited", rank=rank, exit_code=failure.exitcode)
            for rank, failure in sorted(failed.failures.items(), key=lambda item: item[1].timestamp)
        ]
        report.send_bytes(encode(Ended(tuple(causes))))
        sys.exit(1)
    except (OSError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        report.send_bytes(encode(Ended(error=f"{type(error).__name__}: {first_line}")))
        raise


if __name__ == "__main__":
    # A host that was killed has not removed the group's private folder.
    die_when(lambda: os.read(sys.stdin.fileno(), 1), lambda: shutil.rmtree(os.environ["CP_FOLDER"], ignore_errors=True))
    os.environ[AGENT_PID] = str(os.getpid())
    report = Connection(int(sys.argv.pop(1)), readable=False)
    sys.argv[0] = "torchrun"
    main(report)
