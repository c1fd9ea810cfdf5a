/** The sidebar's panel: the group's state, each rank, what can be done about it, and the log. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { diagnostics, copyText } from "./diagnostics.js";
import { element, setText } from "./elements.js";
import { openHelp } from "./help.js";
import { cardName, gpuLine, rankCard, workerName } from "./rank.js";
import { facts, timeline } from "./runs.js";
import { duration, fixed } from "./seconds.js";
import { product, shares } from "./shares.js";
import { BUSY, FAILED, WORKING, elapsed, follow, gpuList, gpus, lastRun, lastWords, left, now, reasonOf, untested } from "./status.js";
import { say } from "./words.js";

/** @typedef {import("./status.js").Status} Status */

const PANEL = "cp-workers";
const LOG_MILLISECONDS = 2000;
const CLOCK_MILLISECONDS = 500;
const NEAR_PIXELS = 24;
const GIB = 2 ** 30;

/** @returns {any} what registerSidebarTab takes */
export function panel() {
  /** @type {() => void} */
  let leave = () => {};
  return {
    id: PANEL,
    icon: "icon-[lucide--cpu]",
    title: say("title"),
    tooltip: say("title"),
    type: "custom",
    render: (/** @type {HTMLElement} */ place) => {
      leave();
      leave = fill(place);
    },
    destroy: () => leave(),
  };
}

/** Open it, if it is not. */
export function openPanel() {
  const tabs = /** @type {any} */ (app.extensionManager).sidebarTab; // later than the published types
  if (tabs.activeSidebarTabId !== PANEL) tabs.toggleSidebarTab(PANEL);
}

/**
 * The state in a few words.
 * @param {Status} status
 */
export function stateText(status) {
  if (status.state === "starting" && status.stage) {
    const { step, steps } = status;
    return say("stage.of", { state: say("state.starting"), stage: say(`stage.${status.stage}`), step, steps });
  }
  if (status.state === "loading") return say("state.loading", { percent: Math.round(status.loaded * 100) });
  if (status.state === "sampling" && status.steps) {
    return say("state.step", { step: status.step, steps: status.steps });
  }
  return say(`state.${status.state}`);
}

/**
 * @param {HTMLElement} place
 * @returns {() => void} what takes it down
 */
function fill(place) {
  const parts = {
    dot: element("span.cp-dot", { "aria-hidden": "true" }),
    state: element("span.cp-state", { role: "status" }),
    clock: element("p.cp-clock.cp-small"),
    hint: element("p.cp-hint"),
    words: element("pre.cp-words-of"),
    help: element("button.cp-link", { type: "button", onclick: () => void openHelp(now().help) }, say("toast.help")),
    model: element("p.cp-model"),
    degrees: element("p.cp-degrees"),
    terms: element("p.cp-degrees.cp-small"),
    facts: element("p.cp-facts"),
    progress: element("progress.cp-progress", { max: 1, value: 0, "aria-label": say("title") }),
    heads: element("div.cp-heads.cp-small", {}, ...["head.memory", "head.step", "head.waiting"].map((name) => element("span", {}, say(name)))),
    ranks: element("ul.cp-ranks", { "aria-label": say("title") }),
  };
  const buttons = actions();
  const runs = timeline();
  const log = logView();
  const view = element(
    "section.cp-panel",
    { "aria-label": say("title") },
    element("h2.cp-title", {}, say("title")),
    element("div.cp-line", {}, parts.dot, parts.state),
    parts.progress, parts.clock, parts.hint, parts.words, parts.help, parts.model, parts.degrees, parts.terms, parts.facts,
    buttons.bar, parts.heads, parts.ranks, runs, log.view,
  );
  place.classList.add("cp-place");
  place.replaceChildren(view);
  const show = (/** @type {Status} */ status) => {
    view.dataset.state = status.state;
    showHead(parts, status);
    parts.heads.hidden = !status.ranks.some((rank) => rank.step_seconds);
    showRanks(parts.ranks, status);
    buttons.show(status);
    runs.show();
    log.choose(status);
    tick();
  };
  const tick = () => showClock(parts.clock, now());
  show(now());
  const unfollow = follow(show);
  const timers = [setInterval(log.refresh, LOG_MILLISECONDS), setInterval(tick, CLOCK_MILLISECONDS)];
  void log.refresh();
  return () => {
    unfollow();
    timers.forEach(clearInterval);
    log.leave();
  };
}

/**
 * How long it has been at it, and how long it still will.
 * @param {HTMLElement} place
 * @param {Status} status
 */
function showClock(place, status) {
  place.hidden = !BUSY.includes(status.state);
  const secondsLeft = left();
  const words = [say("time.elapsed", { time: duration(elapsed()) }), secondsLeft === undefined ? "" : say("time.left", { time: duration(secondsLeft) })];
  setText(place, words.filter(Boolean).join(" · "));
}

/**
 * @param {Record<string, any>} parts
 * @param {Status} status
 */
function showHead(parts, status) {
  parts.dot.dataset.state = status.state;
  setText(parts.state, stateText(status));
  parts.progress.hidden = status.state !== "loading" && !([...WORKING, "starting"].includes(status.state) && status.steps);
  parts.progress.value = status.state === "loading" ? status.loaded : status.step / (status.steps || 1);
  setText(parts.hint, hint(status));
  parts.hint.classList.toggle("cp-bad", FAILED.includes(status.state));
  setText(parts.words, lastWords(status).join("\n"));
  parts.help.hidden = !status.help;
  setText(parts.model, status.model);
  parts.model.title = status.model;
  const cpu = status.ranks[0]?.device === "cpu";
  setText(parts.degrees, status.degrees ? shares(status.degrees, status.world_size, cpu) : "");
  setText(parts.terms, status.degrees ? product(status.degrees, status.world_size, status.nnodes) : "");
  setText(parts.facts, BUSY.includes(status.state) ? "" : facts(lastRun()).join(". "));
  for (const part of ["hint", "words", "model", "degrees", "terms", "facts"]) parts[part].hidden = !parts[part].textContent;
}

/** @param {Status} status */
function hint(status) {
  const hints = {
    none: say("none.hint"), cancelled: say("cancelled.hint"), died: say("died.hint"), unstarted: say("unstarted.hint"),
  };
  const text = reasonOf(status);
  const reason = text && !/[.!?。]$/.test(text) ? `${text}.` : text;
  const one = gpus() === 1 && !BUSY.includes(status.state) ? say("one.hint") : "";
  const newer = BUSY.includes(status.state) ? "" : untested();
  return [reason, hints[/** @type {keyof hints} */ (status.state)] ?? "", one, newer].filter(Boolean).join(" ");
}

/**
 * @param {HTMLElement} list
 * @param {Status} status
 */
function showRanks(list, status) {
  if (!status.ranks.length) {
    list.replaceChildren(...gpuList().map(gpuLine));
    return;
  }
  for (const line of list.querySelectorAll(".cp-unused")) line.remove();
  while (list.children.length > status.ranks.length) list.lastElementChild?.remove();
  while (list.children.length < status.ranks.length) list.append(rankCard());
  status.ranks.forEach((rank, index) => /** @type {any} */ (list.children[index]).show(rank, status));
}

function actions() {
  const stop = button("stop", () => ask("/cp/stop"));
  const free = button("free", () => ask("/cp/free", ({ bytes }) => say(bytes ? "freed.bytes" : "freed", { size: fixed(bytes / GIB, 1) })));
  const restart = button("restart", async () => {
    if (BUSY.includes(now().state)) {
      const sure = await app.extensionManager.dialog.confirm({ title: say("restart"), message: say("restart.sure") });
      if (!sure) return;
    }
    await ask("/cp/restart", () => say("restarted"));
  });
  const copy = button("copy", async () => {
    await copyText(await diagnostics());
    app.extensionManager.toast.add({ severity: "success", summary: say("copied"), life: 2000 });
  });
  const bar = element("div.cp-actions", { role: "group" }, stop, free, restart, copy);
  const show = (/** @type {Status} */ status) => {
    const busy = BUSY.includes(status.state);
    stop.disabled = !busy || status.state === "cancelling";
    free.disabled = !["idle", "cancelled"].includes(status.state) || !status.ranks.some((rank) => rank.weights.length);
    restart.disabled = ["none", "starting", "unknown"].includes(status.state);
  };
  return { bar, show };
}

/**
 * @param {string} name
 * @param {() => Promise<void>} act
 */
function button(name, act) {
  return element("button.cp-button", { type: "button", title: say(`${name}.tip`), "data-cp": name, onclick: act }, say(name));
}

/**
 * @param {string} route
 * @param {(result: any) => string} [done] what to say then
 */
async function ask(route, done) {
  const answer = await api.fetchApi(route, { method: "POST" });
  const result = await answer.json();
  if (!answer.ok) {
    app.extensionManager.toast.add({ severity: "warn", summary: say("failed"), detail: result.error, life: 6000 });
  } else if (done) {
    app.extensionManager.toast.add({ severity: "success", summary: done(result), life: 3000 });
  }
}

function logView() {
  const choice = element("select.cp-choice", { "aria-label": say("log.of"), onchange: () => refresh() });
  let following = true; // until the user scrolls up; a box that shrinks scrolls nothing
  const end = () => {
    if (following) text.scrollTop = text.scrollHeight;
  };
  const read = () => {
    following = text.scrollHeight - text.scrollTop - text.clientHeight < NEAR_PIXELS;
  };
  const text = element("pre.cp-log", { tabindex: 0, role: "log", "aria-label": say("log"), onwheel: () => setTimeout(read), onkeyup: read, onpointerup: read });
  const resized = new ResizeObserver(end);
  resized.observe(text);
  const head = element("div.cp-line", {}, element("h3.cp-subtitle", {}, say("log")), choice);
  const view = element("div.cp-logs", {}, head, text);
  async function refresh() {
    const answer = await api.fetchApi(`/cp/logs?lines=200&rank=${choice.value}`);
    if (!answer.ok) return;
    const { lines } = await answer.json();
    setText(text, lines.map((/** @type {{text: string}} */ line) => line.text).join("\n") || say("log.empty"));
    end();
  }
  /** @type {unknown} */
  let shown; // the loss whose rank's lines were turned to
  const choose = (/** @type {Status} */ { ranks, loss }) => {
    const names = ranks.map(cardName).join();
    if (choice.dataset.names !== names) {
      choice.dataset.names = names;
      const chosen = choice.value;
      const options = ranks.map((rank) => element("option", { value: rank.rank }, [...new Set([cardName(rank), workerName(rank)])].join(", ")));
      choice.replaceChildren(element("option", { value: "" }, say("log.all")), ...options);
      choice.value = Number(chosen) < ranks.length ? chosen : "";
    }
    const lost = loss?.settled && loss.rank !== null && loss.words.length ? `${loss.rank} ${loss.words}` : "";
    if (lost && lost !== shown) {
      choice.value = String(loss?.rank);
      void refresh();
    }
    if (!lost && shown) choice.value = "";
    shown = lost;
  };
  return { view, refresh, choose, leave: () => resized.disconnect() };
}
