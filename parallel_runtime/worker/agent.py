"""Runs torchrun until the host ends: `python -m parallel_runtime.worker.agent REPORT <torchrun arguments>`. The
host has the other end of stdin; REPORT is the descriptor of a pipe for the causes of workers' deaths.

torchrun's agent survives its parent and, when killed, leaves its workers running. Two ways end our processes with the
host, because each covers what the other cannot: the kernel kills a process with its parent, and the host's end of a
pipe or socket closes when the host ends for any reason. torch is imported late: both must work before that."""

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

AGENT_PID = "CP_AGENT_PID"
PR_SET_PDEATHSIG = 1
VMSTAT = "/proc/vmstat"


def main(report: Connection) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from ..engine.comm.ranks import register_rendezvous
    from ..errors import Cause
    from ..wire.messages import Ended, encode

    register_rendezvous()
    kills = out_of_memory_kills()
    try:
        torchrun()
    except ChildFailedError as failed:
        full = out_of_memory_kills() > kills
        causes = [
            Cause(kind="killed", rank=rank, signal=failure.signal_name(), host_memory_full=full)
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


def out_of_memory_kills() -> int:
    """Returns how many processes Linux has killed since main memory, or that of a container, ran out; 0 if unknown."""
    try:
        with open(VMSTAT) as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except OSError:
        return 0


def die_when(wait: Callable[[], object], clean_up: Callable[[], object]) -> None:
    """Calls `wait` on a thread; when it returns, calls `clean_up` and kills this process, whatever it is doing."""

    def watch() -> None:
        wait()
        clean_up()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with the host", daemon=True).start()


def die_with_parent(parent: int) -> None:
    """Has the kernel SIGKILL this process when its parent dies; exits at once if `parent` has died already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    # A host that was killed has not removed the group's private folder.
    die_when(lambda: os.read(sys.stdin.fileno(), 1), lambda: shutil.rmtree(os.environ["CP_FOLDER"], ignore_errors=True))
    os.environ[AGENT_PID] = str(os.getpid())
    report = Connection(int(sys.argv.pop(1)), readable=False)
    sys.argv[0] = "torchrun"
    main(report)
