"""The workers' panel and badge through a whole life: none, starting, loading, sampling, killed, recovered."""

from __future__ import annotations

import re
import shutil
import time
from typing import Any

import pytest

from ..comfyui.graphs import Job, Parallel, longer, sampling_graph
from ..comfyui.server import Server
from .comfyui_page import TAB, TOAST
from .graphs import put_sampler

FLUX = Job(family="flux_dev", cfg=2.0)
LONG = longer(FLUX, steps=2000)
TWO = Parallel(ulysses_degree=2)

STATE = ".cp-state"
OPEN = "() => app.extensionManager.command.execute('CPSampler.OpenPanel')"
SEEN_SECONDS = 2
START_MILLISECONDS = 90_000
REMEMBER = """selector => {
    window.told = [];
    window.died = 0;
    new MutationObserver(() => {
        for (const toast of document.querySelectorAll(selector)) window.told.push(toast.textContent);
        if (document.querySelector('.cp-state')?.textContent === 'Died') window.died ||= Date.now();
    }).observe(document.body, { childList: true, subtree: true, characterData: true });
}"""  # toasts go away, and a busy machine looks late
KEPT_TOASTS = """() => {
    window.lives = [];
    const toasts = app.extensionManager.toast, { add, error } = toasts;
    toasts.add = message => {
        if (message.severity === 'error') window.lives.push(message.life ?? null);
        add(message);
    };
    if (error) toasts.error = (summary, more) => {
        window.lives.push(more.duration === Infinity ? -1 : more.duration);
        return error(summary, more);
    };
}"""  # milliseconds
WAS_SHOWN = "words => window.told.some(said => said.includes(words))"
STARTS = "words => document.querySelector('.cp-state')?.textContent.startsWith(words)"


def shows(page: Any, words: str, milliseconds: float = START_MILLISECONDS) -> str:
    page.wait_for_function(STARTS, arg=words, timeout=milliseconds)
    return page.locator(STATE).inner_text()


LINE = """() => app.graph.nodes.find(node => node.type === 'CPSampler').badges
    .map(badge => typeof badge === 'function' ? badge() : badge)
    .find(badge => badge.text.includes('worker'))?.text ?? ''"""
BOXES = """() => ['[data-testid="error-overlay"]', '.cp-toast'].map(one => document.querySelector(one))
    .map(found => found?.getBoundingClientRect()).map(box => box && [box.top, box.bottom])"""


KEEP_COUNT = """() => {
    window.kept = [];
    const ours = () => new Error().stack.includes('/extensions/context-parallel-sampler/');
    const keep = one => { if (ours()) window.kept.push(one); };
    const drop = one => { window.kept = window.kept.filter(other => other !== one); };
    const { add, delete: remove } = Set.prototype;
    Set.prototype.add = function (one) { if (typeof one === 'function') keep(one); return add.call(this, one); };
    Set.prototype.delete = function (one) { drop(one); return remove.call(this, one); };
    const { setInterval, clearInterval } = window;
    window.setInterval = (...given) => { const timer = setInterval(...given); keep(timer); return timer; };
    window.clearInterval = timer => { drop(timer); clearInterval(timer); };
    for (const owner of [window, document, app.api]) {
        const { addEventListener, removeEventListener } = owner;
        owner.addEventListener = function (...given) { keep(given[1]); return addEventListener.apply(this, given); };
        owner.removeEventListener = function (...given) {
            drop(given[1]);
            return removeEventListener.apply(this, given);
        };
    }
}"""  # listeners and timers of ours, while there are any
GLANCE = """async () => {
    const painted = () => new Promise(requestAnimationFrame);
    const toggle = () => app.extensionManager.sidebarTab.toggleSidebarTab('cp-workers');
    const began = performance.now();
    toggle();
    while (!document.querySelector('.cp-panel .cp-state')?.textContent) await painted();
    await painted();
    const took = performance.now() - began, held = window.kept.length;
    toggle();
    while (document.querySelector('.cp-panel')) await painted();
    return [took, held];
}"""
PAINT_MILLISECONDS = 100


def run_long(server: Server) -> None:
    server.client.queue(sampling_graph(LONG, "CPSampler", TWO))


def put_long(page: Any) -> None:
    """A run of the page's own, which shows on the node too."""
    put_sampler(page, "CPSampler", steps=2000)
    page.evaluate(
        """() => {
            const config = LiteGraph.createNode('CPParallelConfig');
            const sampler = app.graph.nodes.find(one => one.type === 'CPSampler');
            app.graph.add(config);
            const values = { ulysses_degree: 2, devices: 'cpu,cpu' };
            for (const widget of config.widgets) if (widget.name in values) widget.value = values[widget.name];
            config.connect(0, sampler, sampler.findInputSlot('cp_config'));
        }"""
    )


def test_the_panel_follows_a_run_a_kill_and_a_recovery(page: Any, server: Server) -> None:
    page.locator(TAB).click()
    put_long(page)
    page.get_by_test_id("queue-button").click()
    shows(page, "Starting workers: ")
    shows(page, "Step")
    page.wait_for_function("document.querySelectorAll('.cp-holding').length >= 2")
    status = server.client.get("/cp/status")
    assert page.locator(".cp-model").inner_text() == status["model"] == "flux_dev.safetensors"
    assert page.locator(".cp-degrees").first.inner_text() == "2 CPU workers, each half of the picture's tokens"
    assert page.locator(".cp-card").count() == len(status["ranks"]) == 2
    assert page.locator(".cp-rank").all_inner_texts() == ["rank 0 (cpu)", "rank 1 (cpu)"]
    memory = page.locator(".cp-memory").first.text_content()
    used, total = (float(number) for number in re.findall(r"[\d.]+", memory))
    assert total == pytest.approx(status["ranks"][0]["total_bytes"] / 2**30, abs=0.06)
    assert used == pytest.approx(status["ranks"][0]["used_bytes"] / 2**30, abs=0.2)
    step = server.client.get("/cp/status")["step"]
    page.wait_for_function(f"parseInt(document.querySelector('{STATE}').textContent.slice(5)) >= {step}")
    step = int(re.findall(r"\d+", page.locator(STATE).inner_text())[0])
    assert step <= server.client.get("/cp/status")["step"]
    page.wait_for_function(
        "/^\\d+ % waiting for other GPUs$/.test(document.querySelectorAll('.cp-row .cp-waited')[1].title)"
    )
    page.wait_for_function("/^for .* · .* left$/.test(document.querySelector('.cp-clock').textContent)")
    page.wait_for_function(f"/^\\d+ of 2000, .* left, .* s each, 2 CPU workers$/.test(({LINE})())")
    assert page.locator(".cp-legend").inner_text().split() == ["Start", "Load", "Steps"]
    assert page.locator(".cp-badge").inner_text().startswith("Step")

    page.evaluate(REMEMBER, TOAST)
    page.evaluate(KEPT_TOASTS)
    killed = time.time()
    server.workers()[1].kill()
    shows(page, "Died")
    assert page.evaluate("window.died") / 1000 - killed < SEEN_SECONDS
    page.wait_for_function(
        "document.querySelector('.cp-hint').textContent.includes('rank 1 (cpu) was killed by SIGKILL')"
    )
    page.wait_for_function(WAS_SHOWN, arg="A GPU worker died: rank 1 (cpu)")
    page.wait_for_function(WAS_SHOWN, arg="worker rank 1 (cpu) was killed by SIGKILL")
    assert not page.evaluate(WAS_SHOWN, "main memory ran out"), "it has not"
    page.get_by_role("button", name="Show GPU workers").first.wait_for()
    assert page.evaluate("window.lives") in ([None], [-1]), "it goes before anybody has read it"
    page.wait_for_function(f"/^2 CPU workers: failed at step \\d+ of 2000$/.test(({LINE})())")
    assert page.locator(".cp-lost .cp-device").all_text_contents() == ["cpu \u00b7 rank 1"], "which of them it was"
    assert "elastic" not in page.locator(".cp-log").inner_text(), "torchrun's own words"
    page.locator(".cp-panel .cp-link").click()
    page.locator("dialog.cp-help").get_by_role("heading", name="A worker was killed").wait_for()
    page.get_by_role("button", name="Close").last.click()
    if page.locator(".cp-toast").count():  # later pages keep their toasts elsewhere
        page.wait_for_function(f"(() => {{ const [one, two] = ({BOXES})(); return one[1] <= two[0]; }})()")

    page.reload()
    page.wait_for_selector(TAB)
    page.evaluate(REMEMBER, TOAST)
    page.evaluate(OPEN)
    shows(page, "Died")
    server.client.settle()
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    shows(page, "Idle")
    page.wait_for_function(
        "/^4 steps in .* s each\\), after .* of start-up/.test(document.querySelector('.cp-facts').textContent)"
    )
    assert not page.evaluate(WAS_SHOWN, "A GPU worker died"), "an old failure is no news"


def test_the_buttons_do_what_they_say_by_keyboard_alone(page: Any, server: Server) -> None:
    page.evaluate(OPEN)
    run_long(server)
    shows(page, "Step")
    press(page, "stop")
    shows(page, "Cancelled")
    page.wait_for_function("document.querySelector('.cp-run').dataset.end === 'cancelled'")
    assert "cancelled" in page.locator(".cp-run").first.inner_text()
    assert page.get_by_role("button", name="Free memory").is_enabled()
    press(page, "free")
    page.wait_for_function("document.querySelector('.cp-weights')?.textContent === 'no model'")
    shows(page, "Idle")
    page.wait_for_function("document.querySelector('[data-cp=free]').disabled")
    assert not page.locator(".cp-model").is_visible(), "there is none any more"
    assert "warm" not in page.locator(".cp-hint").inner_text()
    before = {process.pid for process in server.workers().values()}
    press(page, "restart")
    page.wait_for_function("document.querySelector('.cp-state').textContent !== 'Idle'")
    shows(page, "Idle")
    assert not before & {process.pid for process in server.workers().values()}


def press(page: Any, name: str) -> None:
    """Tab until the button has the focus, then the space bar; no mouse."""
    page.wait_for_function("name => !document.querySelector(`[data-cp=${name}]`).disabled", arg=name)
    page.locator(".cp-panel").evaluate("panel => { panel.tabIndex = -1; panel.focus() }")
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.dataset.cp") == name:
            page.keyboard.press("Space")
            return
    raise AssertionError(f"Tab does not reach {name}")


def test_it_is_there_at_once_and_keeps_no_listener_and_no_timer_once_it_is_closed(page: Any) -> None:
    page.evaluate(KEEP_COUNT)
    took, held = zip(*(page.evaluate(GLANCE) for _ in range(6)), strict=True)
    assert min(took) < PAINT_MILLISECONDS, took
    assert min(held) > 0
    assert page.evaluate("window.kept.length") == 0


def test_diagnostics_hold_the_state_and_no_secret(page: Any, server: Server) -> None:
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(TAB).click()
    page.evaluate(REMEMBER, TOAST)
    page.locator("[data-cp=copy]").click()
    page.wait_for_function(WAS_SHOWN, arg="Diagnostics copied")
    text = page.evaluate("() => navigator.clipboard.readText()")
    assert '"state": "idle"' in text
    assert "flux_dev.safetensors" in text
    assert "context-parallel-sampler" in text
    assert str(server.base) not in text.partition("### Log")[0]


def test_eight_gpus_are_listed_before_the_first_run_and_fit_beside_the_log(page: Any) -> None:
    """The list alone is another's: no such machine is here."""
    page.evaluate(OPEN)
    page.evaluate(
        """async () => {
            const { api } = await import('/scripts/api.js');
            const now = await (await api.fetchApi('/cp/status')).json();
            const gpu = index => ({ index, name: 'NVIDIA H100 80GB HBM3', total_bytes: 80 * 2 ** 30 });
            const list = { ...now, state: 'none', ranks: [], gpus: 8, gpu_list: [0, 1, 2, 3, 4, 5, 6, 7].map(gpu) };
            const was = api.fetchApi.bind(api);
            api.fetchApi = (route, more) => route === '/cp/status'
                ? Promise.resolve(new Response(JSON.stringify(list))) : was(route, more);
            api.dispatchEvent(new CustomEvent('reconnected'));
        }"""
    )
    page.wait_for_function("document.querySelectorAll('.cp-card').length === 8")
    assert page.locator(".cp-card").last.inner_text().split("\n") == ["GPU 7", "NVIDIA H100 80GB HBM3", "80.0 GiB"]
    log = page.locator(".cp-log").bounding_box()
    assert log["y"] + log["height"] <= 1000, "the log is off the screen"


def test_the_log_follows_where_its_box_shrinks(page: Any, server: Server) -> None:
    page.evaluate(OPEN)
    for _ in range(2):
        server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    page.wait_for_function("document.querySelector('.cp-log').textContent.includes('sampled in')")
    page.set_viewport_size({"width": 1100, "height": 640})
    page.wait_for_function(
        "(() => { const log = document.querySelector('.cp-log');"
        " return log.scrollHeight - log.scrollTop - log.clientHeight < 24; })()"
    )


def test_one_gpu_is_told_what_it_gains_and_a_failed_start_what_failed(page: Any) -> None:
    """The wire alone is another's: no such machine is here."""
    page.evaluate(REMEMBER, TOAST)
    page.evaluate(
        """async () => {
            const { api } = await import('/scripts/api.js');
            const now = await (await api.fetchApi('/cp/status')).json();
            const was = api.fetchApi.bind(api);
            const says = state => ({ ...now, gpus: 1, ...state });
            const answers = [{ state: 'starting' }];
            api.fetchApi = (route, more) => route === '/cp/status'
                ? Promise.resolve(new Response(JSON.stringify(says(answers.shift() ?? {})))) : was(route, more);
            api.dispatchEvent(new CustomEvent('reconnected'));
            await new Promise(done => setTimeout(done, 100));
            const tell = state => api.dispatchEvent(new CustomEvent('cp.status', { detail: says(state) }));
            const failed = { state: 'unstarted', reason: 'only 1 of 2 workers came up', help: 'workers-do-not-start',
                loss: { rank: null, words: [], settled: true } };
            tell(failed), tell({ state: 'starting' }), tell(failed);
            await new Promise(done => setTimeout(done, 500));
            window.failures = document.querySelectorAll('.p-toast-message-error, [data-testid="toast"]').length;
            tell({ state: 'sampling', world_size: 1, loss: null });
        }"""
    )
    page.wait_for_function(WAS_SHOWN, arg="The GPU workers did not start")
    assert page.evaluate("window.failures") == 1, "the failure of the workers that started last"
    assert not page.evaluate(WAS_SHOWN, "worker died")
    page.wait_for_function(WAS_SHOWN, arg="the same result as KSampler")


@pytest.mark.parametrize("page", [{"Comfy.ColorPalette": "light", "Comfy.Locale": "zh"}], indirect=True)
def test_it_speaks_chinese_in_a_light_theme_on_800_pixels(page: Any, server: Server) -> None:
    page.set_viewport_size({"width": 800, "height": 900})
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    page.locator(TAB).click()
    assert shows(page, "空闲") == "空闲"
    panel = page.locator(".cp-panel")
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth"), "something sticks out"
    for button in page.locator(".cp-button").all():
        assert button.evaluate("button => button.scrollWidth <= button.clientWidth"), button.inner_text()
    ink, paper = (panel.evaluate(f"panel => getComputedStyle(panel).{name}") for name in ("color", "backgroundColor"))
    assert ink != paper
    assert sum(map(int, re.findall(r"\d+", ink)[:3])) < 200, "dark words on a light page"


def test_figures_stay_in_sight_beside_a_long_name(page: Any, server: Server) -> None:
    models = server.base / "models" / "diffusion_models"
    name = f"{'wan2.2_t2v_high_noise_14B_fp8_scaled_' * 4}final.safetensors"
    shutil.copy(models / "flux_dev.safetensors", models / name)
    graph = sampling_graph(FLUX, "CPSampler", TWO)
    for call in graph.values():
        call["inputs"].update({"unet_name": name} if "unet_name" in call["inputs"] else {})
    page.locator(TAB).click()
    server.client.run(graph)
    page.wait_for_function("name => document.querySelector('.cp-model').textContent === name", arg=name)
    page.locator(".cp-card summary").first.click()
    page.wait_for_selector(".cp-held:not(:empty)")
    assert page.locator(".cp-panel").evaluate("panel => panel.scrollWidth <= panel.clientWidth"), "something sticks out"
    card, held = page.locator(".cp-card").first.bounding_box(), page.locator(".cp-held").first.bounding_box()
    assert held["width"] > 20
    assert held["x"] + held["width"] <= card["x"] + card["width"]
