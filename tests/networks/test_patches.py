"""PipeFusion computes what its definition says: keys of this step from patches that have passed, of the last one else."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from .zoo import CASES

SAME, EXACT = 1e-6, 1e-5


@pytest.mark.parametrize("case", list(CASES))
def test_x(networks: Groups, case: str) -> None:
    try:
        answers = networks(2).run("tests.networks.patch_cases:same_input", name=case, stages=2, patches=4)
    except Exception as e:
        print("EXC", case, str(e).strip().splitlines()[-1][:300])
        return
    print("OK ", case, [{k: v for k, v in a.items() if k != "bits"} for a in answers][-1])
