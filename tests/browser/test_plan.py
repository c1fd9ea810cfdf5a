"""CP Plan shows its report on the node: a table, and a picture of who holds what."""

from __future__ import annotations

from typing import Any

from .graphs import LATENT, LOADER, PROMPT, put
from .renderers import BOTH


@BOTH
def test_a_run_draws_the_table_and_a_row_a_worker(page: Any) -> None:
    config = ["CPParallelConfig", 340, 0, {"ring_degree": 2, "ulysses_degree": 2, "devices": "cpu,cpu,cpu,cpu"}]
    plan = ["CPPlan", 700, 0, {"cfg": 1.0}]
    links = [[0, 0, 4, "model"], [1, 0, 4, "positive"], [2, 0, 4, "latent_image"], [3, 0, 4, "cp_config"]]
    put(page, [LOADER, PROMPT, LATENT, config, plan], links)
    assert "Run it" in page.locator(".cp-plan").inner_text()
    page.get_by_test_id("queue-button").click()
    page.wait_for_selector(".cp-table")
    rows = dict(
        zip(page.locator(".cp-table th").all_inner_texts(), page.locator(".cp-table td").all_inner_texts(), strict=True)
    )
    assert rows["Tokens"].startswith("192 image + 20 text")
    assert rows["Degrees"].startswith("ring_degree 2 x ulysses_degree 2")
    picture = page.locator(".cp-picture")
    assert picture.locator(".cp-part-tokens").count() == 4
    starts = [part.bounding_box()["x"] for part in picture.locator(".cp-part-tokens").all()]
    assert starts == sorted(set(starts)), "each worker has tokens of its own"
    heads = [part.bounding_box()["x"] for part in picture.locator(".cp-part-heads").all()]
    assert heads[0] == heads[2] < heads[1] == heads[3]
    assert page.locator(".cp-note").count() >= 1, "four workers share this machine's cores"
    assert picture.get_attribute("aria-label")


def test_a_model_that_cannot_run_is_said_without_a_picture(page: Any) -> None:
    patched = ["CPTestAttentionPatch", 340, 0, {}]
    links = [[0, 0, 3, "model"], [3, 0, 4, "model"], [1, 0, 4, "positive"], [2, 0, 4, "latent_image"]]
    put(page, [LOADER, PROMPT, LATENT, patched, ["CPPlan", 700, 0, {}]], links)
    page.get_by_test_id("queue-button").click()
    page.wait_for_selector(".cp-table")
    assert "cannot run in the workers" in page.locator(".cp-table").inner_text()
    assert page.locator(".cp-picture").count() == 0
