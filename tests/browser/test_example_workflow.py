"""A newcomer opens the example workflow, presses Run and sees the same picture twice."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy
from PIL import Image

from .comfyui_page import EXAMPLE, previews, run_example
from .renderers import NODES_2

LINES = "() => app.graph.nodes.map(node => node.cpLine?.text).filter(Boolean)"


@NODES_2
def test_the_example_draws_the_same_picture_twice(page: Any) -> None:
    progress = run_example(page)

    native, ours = (numpy.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int) for png in previews(page))
    assert native.shape == (128, 128, 3)
    assert native.std() > 10, "a picture, not a flat field"
    assert abs(native - ours).max() <= 1

    (sampler,) = (node["id"] for node in json.loads(EXAMPLE.read_text())["nodes"] if node["type"] == "CPSampler")
    values = [event["value"] for event in progress if event["node"] == str(sampler)]
    assert values == sorted(set(values)), "the progress bar only moves forward"
    assert len(values) > 1
    assert values[-1] == 12

    page.wait_for_function(f"({LINES})().filter(line => line.includes('12 steps')).length === 2")
    for line in page.evaluate(LINES):
        assert page.get_by_text(line, exact=True).count() == 1, "how long it took is not drawn"
