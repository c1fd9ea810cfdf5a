"""One rank of a part of the report, or the process that has the workers of one: runs its cases, tells each row at once.

    python -m parallel_runtime.report.part PART SETTING

SETTING is JSON. Rows go to a file in FOLDER, a line of JSON each.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ..worker.comfy_loop.comfyui import import_comfyui
from ..worker.engine.memory import give_back_cache
from ..worker.leash import die_with_parent
from ..worker.ranks import join, rank
from .cases import REST, Setting, found, unbroken

FOLDER, PARENT, ROWS = "REPORT_FOLDER", "REPORT_PARENT", "rows"


def main(name: str, setting: Setting) -> None:
    folder = Path(os.environ[FOLDER])
    device = torch.device(setting.devices[rank()])
    join(device, str(folder / "store"), shared=setting.one_card)
    part = importlib.import_module(f".{name}", __package__)
    if setting.comfyui:
        import_comfyui(setting.comfy, device)
    with torch.inference_mode():
        for case in unbroken({"what": REST}, part.cases(setting, device)):
            row = found(case)
            if rank() == 0:
                with (folder / ROWS).open("a") as rows:
                    rows.write(json.dumps(row) + "\n")
            gc.collect()  # of the next one there would be no room beside what this one held
            give_back_cache(device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT]))  # it may be killed, or its terminal closed
    sys.path.remove(os.getcwd())  # our folders `nodes` and `tests` must not hide ComfyUI's modules of the same names
    main(sys.argv[1], Setting(**json.loads(sys.argv[2])))
