"""CP Parallel Config says while it is edited what its values make, and why they cannot work; few show at first."""

from __future__ import annotations

from typing import Any

import pytest

from .comfyui_page import TAB
from .graphs import put, wait_until_drawn
from .renderers import BOTH

SUMMARY = ".cp-summary"
EDIT = """([name, value]) => {
    const node = app.graph.nodes.find(node => node.type === 'CPParallelConfig');
    const widget = node.widgets.find(widget => widget.name === name);
    widget.value = value;
    widget.callback?.(value, app.canvas, node);
}"""
SAVED = "() => app.graph.serialize().nodes.find(node => node.type === 'CPParallelConfig').widgets_values"
ERROR = "() => Boolean(app.graph.nodes.find(node => node.type === 'CPParallelConfig').has_errors)"
FRAMED = """() => !LiteGraph.vueNodesMode
    || [...document.querySelector('[data-testid="node-inner-wrapper"]').classList]
        .some(name => name.startsWith('ring-destructive'))"""
UNFRAMED = "() => LiteGraph.vueNodesMode && Boolean(app.extensionManager.toast.error)"  # from 1.58 or so on
HEIGHT = "() => app.graph.nodes[0].size[1]"
SIZE = "() => [...app.graph.nodes[0].size]"
SHOWN = """() => LiteGraph.vueNodesMode
    ? [...document.querySelectorAll('[data-testid="node-widget"]')]
        .filter(row => row.offsetHeight && !row.querySelector('.cp-summary, .cp-fold')).length
    : app.graph.nodes[0].widgets.filter(widget => !widget.hidden && widget.serialize !== false).length"""
CORNER = """() => {
    const { x, y } = app.canvas.canvas.getBoundingClientRect(), { offset } = app.canvas.ds, node = app.graph.nodes[0];
    const drawn = document.querySelector(`[data-node-id="${node.id}"]`)?.getBoundingClientRect();
    return LiteGraph.vueNodesMode ? [drawn.right - 5, drawn.bottom - 5]
        : [x + node.pos[0] + offset[0] + node.size[0] - 5, y + node.pos[1] + offset[1] + node.size[1] - 5];
}"""
CONTENT = """() => document.querySelector('.cp-fold').getBoundingClientRect().bottom
    - document.querySelector('.cp-summary').getBoundingClientRect().top"""  # from its first line to the last
HISTORY = """() => {
    const workflow = app.extensionManager.workflow.activeWorkflow;
    workflow.changeTracker.captureCanvasState();
    return [workflow.changeTracker.undoQueue.length, workflow.isModified];
}"""
DEVICES = "() => app.graph.nodes[0].widgets.find(widget => widget.name === 'devices').value"
SAYS = "words => document.querySelector('.cp-summary')?.textContent.includes(words)"


@BOTH
def test_it_says_what_its_values_make_and_turns_red_with_the_reason(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    saved = page.evaluate(SAVED)
    summary = page.locator(SUMMARY)
    page.wait_for_function(SAYS, arg="1 CPU worker, nothing is divided")
    for name, value in (("ring_degree", 2), ("ulysses_degree", 2), ("cfg_degree", 1), ("devices", "cpu,cpu,cpu,cpu")):
        page.evaluate(EDIT, [name, value])
    page.wait_for_function(SAYS, arg="4 CPU workers, each 1/4 of the picture's tokens")
    assert page.locator(".cp-terms").inner_text() == "ring 2 x ulysses 2 x cfg 1 x data 1 = 4 workers"
    assert "4 workers share this machine's" in summary.inner_text(), "four on its cores are no promise of speed"
    assert "cp-bad" not in summary.get_attribute("class")

    page.evaluate(EDIT, ["devices", ""])
    page.evaluate(EDIT, ["ring_degree", 3])
    page.wait_for_function(SAYS, arg="6 workers share this machine's")
    page.evaluate(EDIT, ["devices", "cpu,cpu,cpu,cpu"])
    page.wait_for_function("document.querySelector('.cp-summary.cp-bad')")
    assert "ring_degree 3 x ulysses_degree 2 needs 6 workers" in summary.inner_text()
    assert page.evaluate(ERROR)
    if not page.evaluate(UNFRAMED):
        page.wait_for_function(FRAMED)
    shown, inner = summary.bounding_box(), page.locator(".cp-verdict").bounding_box()
    assert inner["y"] + inner["height"] <= shown["y"] + shown["height"] + 1, "the reason is cut off"

    page.evaluate(EDIT, ["ring_degree", 2])
    page.wait_for_function("!document.querySelector('.cp-summary.cp-bad')")
    assert not page.evaluate(ERROR)
    page.wait_for_function(f"({UNFRAMED})() || (LiteGraph.vueNodesMode ? !({FRAMED})() : true)")
    assert len(page.evaluate(SAVED)) == len(saved), "the text is no widget that is saved"

    heights = []
    for ring, says in ((1, "devices names 4"), (2, "4 CPU workers"), (1, "devices names 4"), (2, "4 CPU workers")):
        page.evaluate(EDIT, ["ring_degree", ring])
        page.wait_for_function(SAYS, arg=says)
        wait_until_drawn(page)
        heights.append(page.evaluate(HEIGHT))
    assert heights[1] == heights[3], "it grows and grows"


@BOTH
def test_a_wrong_one_has_the_nearest_that_works_as_a_button(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"ring_degree": 3, "ulysses_degree": 2, "devices": "cpu,cpu,cpu,cpu"}]])
    page.wait_for_selector(".cp-summary.cp-bad")
    use = page.locator(".cp-out").get_by_role("button", name="Use ring_degree 2")
    wait_until_drawn(page)
    shown, button = page.locator(SUMMARY).bounding_box(), use.bounding_box()
    assert button["y"] + button["height"] <= shown["y"] + shown["height"] + 1, "it is cut off"
    use.click()
    page.wait_for_function(SAYS, arg="4 CPU workers")
    assert page.locator(".cp-out button").count() == 0
    assert not page.evaluate(ERROR)


@pytest.mark.parametrize("page", [{"Comfy.Locale": "zh"}], indirect=True)
def test_why_it_cannot_work_is_said_in_the_users_language(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"ring_degree": 3, "ulysses_degree": 1, "devices": "cpu,cpu"}]])
    page.wait_for_selector(".cp-summary.cp-bad")
    text = page.locator(".cp-what").inner_text()
    assert text == (
        "ring_degree 3 x ulysses_degree 1 需要 3 个工作进程，但只有 2 个设备：cpu, cpu。最接近的可行设置是 "  # noqa: RUF001
        "ring_degree 2 x ulysses_degree 1"
    )


@BOTH
def test_three_widgets_show_and_those_that_differ_from_the_preset(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    page.wait_for_function(f"({SHOWN})() === 3")
    wait_until_drawn(page)
    assert page.evaluate(HEIGHT) < 300
    page.get_by_role("button", name="16 more options").click()
    page.wait_for_function(f"({SHOWN})() === 19")
    wait_until_drawn(page)
    fewer, summary = page.get_by_role("button", name="Fewer options"), page.locator(SUMMARY).bounding_box()
    assert fewer.bounding_box()["y"] - (summary["y"] + summary["height"]) < 30, "in sight, above all widgets"
    fewer.click()
    page.wait_for_function(f"({SHOWN})() === 3")
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    assert page.evaluate(HEIGHT) < 300, "as high as all widgets, once it is loaded"
    page.evaluate(EDIT, ["dtype", "banana"])
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function("document.querySelector('.cp-summary.cp-bad')?.textContent.includes('banana')")
    page.wait_for_function(f"({SHOWN})() === 4")
    page.get_by_role("button", name="Use dtype auto").click()
    page.wait_for_function(f"({SHOWN})() === 3")


def test_a_saved_value_of_a_wrong_kind_is_red_and_loads(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    workflow = page.evaluate("() => app.graph.serialize()")
    for value in (None, 3):
        workflow["nodes"][0]["widgets_values"][6] = value
        workflow["nodes"][0].pop("widgets_values_named", None)
        page.evaluate("async workflow => app.loadGraphData(workflow)", workflow)
        page.wait_for_selector(".cp-summary.cp-bad")
        assert page.get_by_text("Loading aborted").count() == 0
        page.get_by_role("button", name="Use devices auto").click()
        page.wait_for_function(SAYS, arg="1 CPU worker")


@BOTH
def test_a_size_that_a_user_gave_it_stays_with_the_workflow(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    page.evaluate("() => app.graph.nodes[0].setSize([420, 800])")
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    assert page.evaluate(SIZE) == [420, 800]


@BOTH
def test_a_node_that_is_dragged_larger_has_its_room_below_what_it_shows(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    content, (_, height) = page.evaluate(CONTENT), page.evaluate(SIZE)
    x, y = page.evaluate(CORNER)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y + 150, steps=3)
    page.mouse.move(x, y + 300, steps=3)
    page.mouse.up()
    wait_until_drawn(page)
    size = page.evaluate(SIZE)
    assert size[1] > height + 250
    assert abs(page.evaluate(CONTENT) - content) < 2, "a gap inside"
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    assert page.evaluate(SIZE) == size
    assert abs(page.evaluate(CONTENT) - content) < 2, "a gap inside, once it is loaded"


@BOTH
def test_opening_more_options_is_no_step_to_undo(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    page.evaluate("() => app.graph.nodes[0].setSize([420, 500])")
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    history, size = page.evaluate(HISTORY), page.evaluate(SIZE)
    assert history[1] is False
    page.get_by_role("button", name="16 more options").click()
    page.wait_for_function(f"({SHOWN})() === 19")
    wait_until_drawn(page)
    assert page.evaluate(HISTORY) == history
    page.get_by_role("button", name="Fewer options").click()
    page.wait_for_function(f"({SHOWN})() === 3")
    wait_until_drawn(page)
    assert page.evaluate(HISTORY) == history
    assert page.evaluate(SIZE) == size, "the size that a user gave it"

    page.get_by_role("button", name="16 more options").click()
    page.wait_for_function(f"({SHOWN})() === 19")
    page.evaluate(EDIT, ["nnodes", 2])
    page.wait_for_function(f"({SHOWN})() === 20")  # rdzv_endpoint too
    assert page.evaluate(HISTORY) == [history[0] + 1, True], "an edit is one"
    page.keyboard.press("Control+z")
    page.wait_for_function(f"({SHOWN})() === 3")
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    assert page.evaluate(HISTORY) == history
    assert page.evaluate(SIZE) == size
    page.get_by_role("button", name="16 more options").click()
    page.wait_for_function(f"({SHOWN})() === 19")


def test_degrees_that_are_all_left_to_the_model_are_not_listed(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"devices": "cpu,cpu"}]])
    page.wait_for_function(SAYS, arg="2 CPU workers")
    assert not page.locator(".cp-terms").is_visible()
    page.evaluate(EDIT, ["data_degree", 2])
    page.locator(".cp-terms", has_text="data 2 = 2 workers").wait_for()


def test_the_preset_of_several_machines_leads_to_their_page(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    link = page.locator(".cp-preset").get_by_role("button", name="Several machines")
    assert not link.is_visible()
    page.locator(".cp-preset select").select_option("machines")
    link.click()
    page.locator("dialog.cp-help").get_by_role("heading", name="Several machines").first.wait_for()


@BOTH
def test_what_only_several_machines_or_patches_need_shows_with_them(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"nnodes": 2}]])
    page.wait_for_function(f"({SHOWN})() === 5")
    page.evaluate(EDIT, ["nnodes", 1])
    page.wait_for_function(f"({SHOWN})() === 3")
    page.evaluate(EDIT, ["patches", 2])
    page.wait_for_function(f"({SHOWN})() === 5")


@BOTH
def test_a_preset_sets_its_widgets_and_is_read_from_them(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"data_degree": 2, "devices": "cpu,cpu"}]])
    page.wait_for_function(SAYS, arg="2 CPU workers")
    preset, devices = page.get_by_label("Preset"), page.evaluate(DEVICES)
    hint = page.locator(".cp-preset .cp-hint")
    assert (preset.input_value(), hint.inner_text()) == ("", "Differs from Auto: data_degree 2.")
    for name in [option.get_attribute("value") for option in preset.locator("option").all()][:-1]:
        preset.select_option(name)
        page.wait_for_function("name => document.querySelector('.cp-preset select').value === name", arg=name)
        page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
        page.wait_for_function("name => document.querySelector('.cp-preset select').value === name", arg=name)
        wrong = {"machines": "rdzv_endpoint", "fastest": "cuda_graphs"}.get(str(name))
        page.wait_for_function(SAYS, arg=wrong or "2 CPU workers")
        assert (page.locator(".cp-summary.cp-bad").count() == 1) == (wrong is not None)
    page.evaluate(EDIT, ["step_cache", 0.1])
    wait_until_drawn(page)
    assert preset.input_value() == "approximate", "it is the user's to adjust"
    assert "Approximate: not the picture of one GPU." in page.locator(".cp-verdict").inner_text()
    for edit in (["pipeline_degree", 2], ["patches", 4], ["shares", "3,2"], ["ring_degree", 3]):
        page.evaluate(EDIT, edit)
    wait_until_drawn(page)
    assert (preset.input_value(), preset.locator("option:checked").inner_text()) == ("", "Custom")
    assert hint.inner_text() == (
        "Differs from Auto: ring_degree 3, pipeline_degree 2, patches 4, shares 3,2, step_cache 0.1."
    )
    preset.select_option("auto")
    page.wait_for_function("() => app.graph.nodes[0].widgets.find(one => one.name === 'patches').value === 1")
    names = page.evaluate("() => Object.values(app.graph.nodes[0].constructor.nodeData.input_order).flat()")
    values = dict(zip(names, page.evaluate(SAVED), strict=True))
    assert [values[name] for name in ("pipeline_degree", "shares", "ring_degree", "data_degree")] == [1, "auto", 0, 0]
    assert page.evaluate(DEVICES) == devices, "which GPUs is no matter of a preset"
    assert preset.locator("option").count() == 7, "nothing is custom any more"


@BOTH
def test_what_is_approximate_says_so(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"devices": "cpu,cpu", "pipeline_degree": 2}]])
    page.wait_for_function(SAYS, arg="2 CPU workers, in 2 stages")
    assert "pproximate" not in page.locator(".cp-verdict").inner_text(), "a pipeline is exact"
    page.evaluate(EDIT, ["patches", 4])
    page.wait_for_function("document.querySelector('.cp-verdict').textContent.includes('Approximate: not the picture')")


def test_an_answer_to_an_older_edit_is_not_shown_and_no_answer_is_said(page: Any) -> None:
    def slow(route: Any) -> None:
        values = route.request.post_data_json
        if values["ring_degree"] == 7:
            late.append(route)
        elif values["ring_degree"] == 5:
            route.abort()
        else:
            route.continue_()

    late: list[Any] = []
    put(page, [["CPParallelConfig", 0, 0, {"devices": "cpu,cpu"}]])
    page.wait_for_function(SAYS, arg="2 CPU workers")
    page.context.route("**/cp/check", slow)
    with page.expect_request("**/cp/check"):
        page.evaluate(EDIT, ["ring_degree", 7])
    page.evaluate(EDIT, ["ring_degree", 2])
    page.wait_for_function(SAYS, arg="ring 2")
    with page.expect_response("**/cp/check"):
        late.pop().continue_()
    wait_until_drawn(page)
    page.wait_for_timeout(200)
    assert page.locator(".cp-summary.cp-bad").count() == 0, "the verdict on ring_degree 7 stands over ring_degree 2"
    page.evaluate(EDIT, ["ring_degree", 5])
    page.wait_for_function(SAYS, arg="No answer from ComfyUI")


@BOTH
def test_values_are_saved_and_read_in_the_order_of_the_inputs(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"ring_degree": 2, "devices": "cpu,cpu", "warmup_steps": 3}]])
    page.wait_for_function(SAYS, arg="2 CPU workers")
    names = page.evaluate("() => Object.values(app.graph.nodes[0].constructor.nodeData.input_order).flat()")
    values = dict(zip(names, page.evaluate(SAVED), strict=True))
    assert (values["ring_degree"], values["devices"], values["warmup_steps"]) == (2, "cpu,cpu", 3)
    workflow = page.evaluate("() => app.graph.serialize()")
    workflow["nodes"][0].pop("widgets_values_named", None)  # as older pages save it
    page.evaluate("async workflow => app.loadGraphData(workflow)", workflow)
    page.wait_for_function(SAYS, arg="2 CPU workers")
    assert page.evaluate(SAVED) == list(values.values())


def reload_with_status(page: Any, **fields: Any) -> None:
    """Opens the page again, whose server's status has these fields instead."""

    def changed(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), **fields})

    page.context.route("**/cp/status", changed)
    page.reload()
    page.wait_for_function("window.app?.extensionManager && window.app.graph")


def test_a_button_that_gives_the_devices_back_says_every_gpu(page: Any) -> None:
    reload_with_status(page, gpus=3)
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.evaluate(EDIT, ["devices", 3])
    page.get_by_role("button", name="Use every GPU").click()
    page.wait_for_function(f"({DEVICES})() === ''")


@BOTH
def test_gpus_are_chosen_by_name_and_the_text_takes_what_is_no_list(page: Any) -> None:
    gpus = [{"index": index, "name": "NVIDIA L4", "total_bytes": 24 * 2**30} for index in range(3)]
    reload_with_status(page, gpu_list=gpus)
    page.wait_for_selector(TAB)
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(f"({SHOWN})() === 2")
    boxes = page.locator(".cp-gpu")
    assert boxes.all_inner_texts() == [f"GPU {index}\nNVIDIA L4\n24.0 GiB" for index in range(3)]
    boxes.nth(1).click()
    assert page.evaluate(DEVICES) == "0,2"
    boxes.nth(0).click()
    assert page.evaluate(DEVICES) == "2"
    assert boxes.nth(2).locator("input").is_disabled(), "no GPU at all"
    boxes.nth(0).click()
    boxes.nth(1).click()
    assert page.evaluate(DEVICES) == "", "all of them"
    page.evaluate(EDIT, ["devices", "0,0"])
    page.wait_for_function(f"({SHOWN})() === 3")


def test_the_properties_panel_leaves_what_it_says_on_the_node(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wide = page.locator(SUMMARY).bounding_box()["width"]
    page.get_by_role("button", name="Toggle properties panel").click()
    page.evaluate("() => { app.canvas.deselectAll(); app.canvas.select(app.graph.nodes[0]); }")
    page.get_by_test_id("panel-tab-parameters").click()
    wait_until_drawn(page)
    assert page.get_by_text("cp_summary").count() == 0, "a blank row"
    assert abs(page.locator(SUMMARY).bounding_box()["width"] - wide) < 2, "it has shrunk to the panel"
