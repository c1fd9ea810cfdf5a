"""CP Plan shows its report on the node: a table, and a picture of who holds what."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .graphs import LATENT, LOADER, PROMPT, put, wait_until_drawn
from .renderers import BOTH

RUN = "queue-button"
COST = ".cp-cost"
ANOTHER_ENDS = "() => app.api.dispatchCustomEvent('execution_success', { prompt_id: 'another', timestamp: 0 })"
CONFIG = """() => Object.fromEntries(app.graph.nodes.find(node => node.type === 'CPParallelConfig')
    .widgets.map(widget => [widget.name, widget.value]))"""

RING = """ring => {
    app.graph.nodes.find(node => node.type === 'CPParallelConfig')
        .widgets.find(widget => widget.name === 'ring_degree').value = ring;
}"""
CAPTURE = "() => app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState()"  # as every click does
UNDO = """async ring => {
    const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker;
    const config = () => app.graph.nodes.find(node => node.type === 'CPParallelConfig');
    do await tracker.undo();
    while (config().widgets.find(widget => widget.name === 'ring_degree').value !== ring);
}"""


@BOTH
def test_a_refusal_comes_first_and_its_button_leads_to_the_picture_and_to_times(page: Any) -> None:
    config = ["CPParallelConfig", 340, 0, {"ring_degree": 2, "ulysses_degree": 2, "devices": "cpu,cpu"}]
    plan = ["CPPlan", 700, 0, {"cfg": 1.0}]
    links = [[0, 0, 4, "model"], [1, 0, 4, "positive"], [2, 0, 4, "latent_image"], [3, 0, 4, "cp_config"]]
    put(page, [LOADER, PROMPT, LATENT, config, plan], links)
    assert "Run it" in page.locator(".cp-plan").inner_text()
    assert "takes 4 steps on 1, 2, 4, ... GPUs" in page.locator(COST).inner_text(), "before anybody presses Measure"
    page.get_by_test_id(RUN).click()
    page.wait_for_selector(".cp-trouble")
    report = page.locator(".cp-report > *")
    assert "ring_degree 2 x ulysses_degree 2 needs 4 workers" in report.nth(0).inner_text()
    assert page.locator(".cp-picture").count() == 0, "of what will not run"
    assert page.get_by_role("button", name="Measure", exact=True).is_disabled()
    page.locator(".cp-report").get_by_role("button", name="Use ring_degree 1").click()
    assert page.evaluate(CONFIG)["ring_degree"] == 1
    page.wait_for_function("document.querySelector('.cp-report').textContent.includes('Run it again')")

    page.get_by_test_id(RUN).click()
    page.wait_for_selector(".cp-picture")
    rows = dict(
        zip(page.locator(".cp-table th").all_inner_texts(), page.locator(".cp-table td").all_inner_texts(), strict=True)
    )
    assert rows["Tokens"].startswith("192 image + 20 text")
    assert rows["Degrees"].startswith("ring_degree 1 x ulysses_degree 2")
    picture = page.locator(".cp-picture")
    assert picture.locator(".cp-part-tokens").count() == 2
    for kind in ("tokens", "heads"):
        starts = [part.bounding_box()["x"] for part in picture.locator(f".cp-part-{kind}").all()]
        assert starts == sorted(set(starts)), "each worker has its own"
    assert page.locator(".cp-trouble").count() == 0
    assert page.locator(".cp-note").count() >= 1, "two workers share this machine's cores"
    assert picture.get_attribute("aria-label")

    assert "takes 4 steps on 1, 2 CPU workers, one after the other" in page.locator(COST).inner_text()
    page.get_by_role("button", name="Measure", exact=True).click()
    page.get_by_role("button", name="Measuring").wait_for()
    page.evaluate(ANOTHER_ENDS)
    assert page.get_by_role("button", name="Measuring").is_disabled(), "another prompt of the queue has ended"
    page.wait_for_selector(".cp-chart")
    page.get_by_role("button", name="Measure", exact=True).wait_for()
    assert re.search(r"About (\d+ min )?\d+ s, going by earlier runs\.", page.locator(COST).inner_text())
    assert page.locator(".cp-who").all_inner_texts() == ["1 CPU worker", "2 CPU workers, ulysses 2"]
    assert all("s per step" in took for took in page.locator(".cp-took").all_inner_texts())
    assert "times as fast" not in page.locator(".cp-chart").inner_text(), "they share this machine's cores"
    assert "says nothing about GPUs" in (page.locator(".cp-chart").get_attribute("aria-label") or "")


@BOTH
def test_compare_says_on_the_node_how_far_apart_a_step_of_each_sampler_is(page: Any) -> None:
    config = ["CPParallelConfig", 340, 0, {"ring_degree": 1, "ulysses_degree": 2, "devices": "cpu,cpu"}]
    sampler = ["CPSampler", 700, 500, {"steps": 4, "cfg": 1.0, "sampler_name": "euler_ancestral"}]
    sockets = {0: ("model",), 1: ("positive", "negative"), 2: ("latent_image",), 3: ("cp_config",)}
    links = [[source, 0, 4, name] for source, names in sockets.items() for name in names]
    links += [[source, 0, 5, names[0]] for source, names in sockets.items()]
    put(page, [LOADER, PROMPT, LATENT, config, sampler, ["CPPlan", 1100, 0, {"cfg": 1.0}]], links)
    assert "takes one step of each sampler" in page.locator(".cp-plan").inner_text(), "before anybody presses it"
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("button", name="Comparing").wait_for()
    page.wait_for_selector(".cp-picture", timeout=120_000)
    page.get_by_role("button", name="Compare", exact=True).wait_for()
    assert re.match(r"CP Sampler \(5\): equal to rounding\.", page.locator(".cp-table td").first.inner_text())
    assert page.locator(".cp-table th").first.inner_text() == "Compare"
    assert page.get_by_role("button", name="Measure", exact=True).is_enabled()


@BOTH
def test_its_report_and_buttons_are_there_after_an_undo(page: Any) -> None:
    config = ["CPParallelConfig", 340, 0, {"ring_degree": 2, "ulysses_degree": 2, "devices": "cpu,cpu"}]
    links = [[0, 0, 4, "model"], [1, 0, 4, "positive"], [2, 0, 4, "latent_image"], [3, 0, 4, "cp_config"]]
    put(page, [LOADER, PROMPT, LATENT, config, ["CPPlan", 700, 0, {"cfg": 1.0}]], links)
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")  # a workflow of its own
    page.get_by_test_id(RUN).click()
    page.wait_for_selector(".cp-trouble")
    page.evaluate(CAPTURE)
    page.evaluate(RING, 3)
    page.wait_for_selector(".cp-old")
    page.evaluate(CAPTURE)
    page.evaluate(UNDO, 2)
    page.wait_for_function("document.querySelector('.cp-trouble') && !document.querySelector('.cp-old')")
    page.locator(".cp-report").get_by_role("button", name="Use ring_degree 1").click()
    assert page.evaluate(CONFIG)["ring_degree"] == 1


@pytest.mark.parametrize("page", [{"Comfy.Locale": "ja"}], indirect=True)
def test_it_speaks_the_users_language_refusals_too(page: Any) -> None:
    config = ["CPParallelConfig", 340, 0, {"ring_degree": 2, "ulysses_degree": 2, "devices": "cpu,cpu"}]
    links = [[0, 0, 4, "model"], [1, 0, 4, "positive"], [2, 0, 4, "latent_image"], [3, 0, 4, "cp_config"]]
    put(page, [LOADER, PROMPT, LATENT, config, ["CPPlan", 700, 0, {"cfg": 1.0}]], links)
    page.get_by_test_id(RUN).click()
    page.wait_for_selector(".cp-trouble")
    texts = [page.locator(".cp-trouble").inner_text(), *page.locator(".cp-table td").all_inner_texts()]
    assert texts[0].startswith("この CP Parallel Config では動作しません：ring_degree 2 x ulysses_degree 2 には 4 個の")  # noqa: RUF001
    assert not [one for one in texts if re.search(r"\b(the|of|with|worker|workers)\b", one)], "these are English"


def test_a_model_that_cannot_run_is_said_without_a_picture_and_stays_on_the_node(page: Any) -> None:
    patched = ["CPTestForeignWrapper", 340, 0, {"kind": "copied"}]
    links = [[0, 0, 3, "model"], [3, 0, 4, "model"], [1, 0, 4, "positive"], [2, 0, 4, "latent_image"]]
    put(page, [LOADER, PROMPT, LATENT, patched, ["CPPlan", 700, 0, {}]], links)
    page.get_by_test_id(RUN).click()
    page.wait_for_selector(".cp-trouble")
    assert "cannot run in the workers" in page.locator(".cp-trouble").inner_text()
    assert page.locator(".cp-picture").count() == 0

    wide = page.locator(".cp-report").bounding_box()["width"]
    page.get_by_role("button", name="Toggle properties panel").click()
    page.evaluate(
        "() => { app.canvas.deselectAll(); app.canvas.select(app.graph.nodes.find(node => node.type === 'CPPlan')); }"
    )
    page.get_by_test_id("panel-tab-parameters").click()
    wait_until_drawn(page)
    assert page.get_by_text("cp_plan").count() == 0, "a blank row"
    assert abs(page.locator(".cp-report").bounding_box()["width"] - wide) < 2, "it has shrunk to the panel"
