"""python -m tests.soak --minutes N [--seed S] [--only cancel kill ...] [--times N]

Starts a ComfyUI with tiny models on CPU workers, disturbs it, and ends with a table; exit code 1 for a broken promise.
`--only cancel --times 100` and `--only kill --times 20` are the two classic ones, also with `--weights shard`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import get_args

from parallel_runtime.request import WeightsChoice

from ..comfyui.comfy import find_comfy, why_there_is_none
from ..comfyui.server import running_server
from .disturbances import CASES, DISTURBANCES, SECONDS, with_weights
from .soak import Soak


def main() -> int:
    options = arguments()
    CASES.update(with_weights(options.weights))
    comfy = find_comfy()
    if comfy is None:
        print(why_there_is_none())
        return 2
    with running_server(comfy, env=SECONDS) as server:
        soak = Soak(server, options.seed)
        end = time.monotonic() + 60 * options.minutes
        for turn in itertools.count():
            if turn == options.times if options.times else time.monotonic() > end:
                break
            soak.play(options.only[turn % len(options.only)] if options.only else soak.any_disturbance())
            if options.verbose:
                print(soak.report(), flush=True)
        soak.check_holdings()
        print(soak.report())
    return 1 if soak.failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--times", type=int, default=0, help="so many disturbances, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(DISTURBANCES), default=[], help="these, in turn")
    parser.add_argument("--weights", choices=list(get_args(WeightsChoice)), default="auto")
    parser.add_argument("--verbose", action="store_true", help="the table after each")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
