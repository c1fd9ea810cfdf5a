"""One rank of a torchrun group that shares one card: each backend's attention alone and cut, against float64.

    torchrun --nproc-per-node 2 -m tests.gpu.backend_ranks FOLDER [cuda]

Rank 0 writes FOLDER/errors.json: for each case {"error": of the ranks, "alone": of one process}, mean difference over
the reference's deviation on the rank that is further off; {"missing": why the backend is not here}; {"failed": why}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.engine.attention.dispatch import attend, check_backend
from parallel_runtime.engine.comm.mesh import ContextMesh, build_mesh

from ..bench.report import measuring as report
from ..bench.report.measuring import Measurement, measurement_of
from ..engine import cases as engine
from ..engine.meshes import parallelism
from ..engine.reference import Problem, attention, random_problem
from .backend_cases import Case, cases

SEEDS = range(4)


def errors(case: Case, place: ContextMesh, device: torch.device) -> Measurement:
    """Of this rank's rows, and of the same rows where one process computes everything: the mean over some problems."""
    summed = {"error": 0.0, "alone": 0.0}
    for seed in SEEDS:
        problem = _problem(case, seed, device)
        reference = attention(problem)
        full_mask = None if problem.mask is None else engine.masked_as(problem, "whole 4d bool", place)
        alone = attend(problem.query, problem.key, problem.value, full_mask, None, case.backend)
        own_mask = None if problem.mask is None else engine.masked_as(problem, "4d bool", place)
        got = engine.run(problem, list(case.degrees), own_mask, {"attention_backend": case.backend}, place)
        rows = engine.rows(problem, place)
        expected = engine.own(reference, problem, place)[:, rows]
        for name, out in (("error", got[:, rows]), ("alone", engine.own(alone, problem, place)[:, rows])):
            summed[name] += _error(out, expected, reference) / len(SEEDS)
    return summed


def _problem(case: Case, seed: int, device: torch.device) -> Problem:
    problem = random_problem(seed, masked=case.masked, grouped=case.grouped, head_dims=(64, 128))
    dtype = getattr(torch, case.dtype)
    inputs = {name: getattr(problem, name).to(device, dtype) for name in ("query", "key", "value")}
    return replace(problem, **inputs, mask=None if problem.mask is None else problem.mask.to(device))


def _error(out: Tensor, expected: Tensor, reference: Tensor) -> float:
    assert not out.isnan().any(), "NaN"
    return float((out.double() - expected).abs().mean() / reference.std()) if out.numel() else 0.0


def _missing(case: Case, device: torch.device) -> str | None:
    """Why diffusers' own call of the backend does not work on this machine."""
    query = torch.ones(1, 64, 1, 64, device=device, dtype=getattr(torch, case.dtype))
    try:
        check_backend(case.backend, device)
        attend(query, query, query, None, None, case.backend)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def main(folder: Path, device: torch.device) -> None:
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo")
    places = {case.degrees: build_mesh(parallelism(*case.degrees), device) for case in cases()}
    rows: dict[str, Measurement] = {}
    for case in cases():
        missing, find = _missing(case, device), partial(errors, case, places[case.degrees], device)
        rows[str(case)] = {"missing": missing} if missing else measurement_of(report.Case({}, find))
    if dist.get_rank() == 0:
        (folder / "errors.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2] if len(sys.argv) > 2 else "cuda"))
