"""python -m tests.bench.vae [--name "FLUX, SD3"] [--latent 1,8,64,64] [--ranks 1 2] [--fake "FLUX 2048x2048"]

With --json FILE the numbers go there too.
One VAE decode in one process and divided, side by side: time, peak of memory, bytes sent. Tiny weights on CPU ranks;
with --fake a rank's share of a real VAE on fake tensors, without times. Needs a ComfyUI.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..comfyui.comfy import OUR_ROOT, find_comfy, why_there_is_none

MIB = 2**20


def main() -> None:
    options = _options()
    rows = _rows(options)
    first = rows[0]
    columns = ["wall", "cpu", "peak"] if not options.fake else ["flops", "peak"]
    print(f"| ranks | {' | '.join(columns)} | MiB sent | exchanges |\n|{'---|' * (len(columns) + 3)}")
    for row in rows:
        values = [f"{row[key] / (MIB if key == 'peak' else 1):.3g} ({first[key] / row[key]:.2f}x)" for key in columns]
        print(f"| {row['ranks']} | {' | '.join(values)} | {row['sent'] / MIB:.1f} | {row['exchanges']} |")
    if not options.fake:
        print(f"Host time of a torch function that is not divided, under the mode: +{first['overhead'] * 1e6:.2f} us")
    if options.json:
        options.json.write_text(json.dumps(rows))


def _rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    comfy = find_comfy()
    if comfy is None:
        sys.exit(why_there_is_none())
    what = ["fake", options.fake, "decode"] if options.fake else ["measure", options.name, "decode", options.latent]
    command = [str(comfy.python), "-m", f"tests.vae.{what[0]}", str(comfy.root), *what[1:], *map(str, options.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=OUR_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="FLUX, SD3")
    parser.add_argument("--latent", default="1,8,64,64")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--fake", default="")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
