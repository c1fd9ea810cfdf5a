/** The sidebar's panel: the group's state, each rank, what can be done about it, and the log. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { diagnostics, copyText } from "./diagnostics.js";
import { element, write } from "./elements.js";
import { rankCard } from "./rank.js";
import { BUSY, WORKING, follow, now } from "./status.js";
import { say } from "./words.js";

/** @typedef {import("./status.js").Status} Status */

export const PANEL = "cp-workers";
const LOG_MILLISECONDS = 2000;
const NEAR_PIXELS = 24;

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
export function inWords(status) {
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
    hint: element("p.cp-hint"),
    model: element("p.cp-model"),
    degrees: element("p.cp-degrees"),
    progress: element("progress.cp-progress", { max: 1, value: 0, "aria-label": say("title") }),
    ranks: element("ul.cp-ranks", { "aria-label": say("title") }),
  };
  const buttons = actions();
  const log = logView();
  const view = element(
    "section.cp-panel",
    { "aria-label": say("title") },
    element("h2.cp-title", {}, say("title")),
    element("div.cp-line", {}, parts.dot, parts.state),
    parts.progress, parts.hint, parts.model, parts.degrees, buttons.bar, parts.ranks, log.view,
  );
  place.classList.add("cp-place");
  place.replaceChildren(view);
  const show = (/** @type {Status} */ status) => {
    view.dataset.state = status.state;
    showHead(parts, status);
    showRanks(parts.ranks, status);
    buttons.show(status);
    log.choose(status.ranks.length);
  };
  show(now());
  const unfollow = follow(show);
  const timer = setInterval(log.refresh, LOG_MILLISECONDS);
  void log.refresh();
  return () => {
    unfollow();
    clearInterval(timer);
  };
}

/**
 * @param {Record<string, any>} parts
 * @param {Status} status
 */
function showHead(parts, status) {
  parts.dot.dataset.state = status.state;
  write(parts.state, inWords(status));
  parts.progress.hidden = status.state !== "loading" && !(WORKING.includes(status.state) && status.steps);
  parts.progress.value = status.state === "loading" ? status.loaded : status.step / (status.steps || 1);
  const hints = { none: say("none.hint"), cancelled: say("cancelled.hint"), died: say("died.hint") };
  const hint = hints[/** @type {keyof hints} */ (status.state)] ?? "";
  write(parts.hint, [status.reason, hint].filter(Boolean).join(status.reason.endsWith(".") ? " " : ". "));
  parts.hint.classList.toggle("cp-bad", status.state === "died");
  write(parts.model, status.model);
  parts.model.title = status.model;
  write(parts.degrees, degreesInWords(status));
  for (const part of ["hint", "model", "degrees"]) parts[part].hidden = !parts[part].textContent;
}

/** @param {Status} status */
function degreesInWords(status) {
  if (!status.degrees) return "";
  const names = ["ring", "ulysses", "cfg", "data"];
  const degrees = names.map((name) => `${name} ${status.degrees?.[`${name}_degree`]}`).join(" x ");
  const workers = say(status.world_size === 1 ? "worker" : "workers", { degrees, count: status.world_size });
  return status.nnodes > 1 ? `${workers} ${say("machines", { count: status.nnodes })}` : workers;
}

/**
 * @param {HTMLElement} list
 * @param {Status} status
 */
function showRanks(list, status) {
  while (list.children.length > status.ranks.length) list.lastElementChild?.remove();
  while (list.children.length < status.ranks.length) list.append(rankCard());
  status.ranks.forEach((rank, index) => /** @type {any} */ (list.children[index]).show(rank, status));
}

function actions() {
  const stop = button("stop", () => ask("/cp/stop"));
  const free = button("free", () => ask("/cp/free", "freed"));
  const restart = button("restart", async () => {
    if (BUSY.includes(now().state)) {
      const sure = await app.extensionManager.dialog.confirm({ title: say("restart"), message: say("restart.sure") });
      if (!sure) return;
    }
    await ask("/cp/restart", "restarted");
  });
  const copy = button("copy", async () => {
    await copyText(await diagnostics());
    app.extensionManager.toast.add({ severity: "success", summary: say("copied"), life: 2000 });
  });
  const bar = element("div.cp-actions", { role: "group" }, stop, free, restart, copy);
  const show = (/** @type {Status} */ status) => {
    const busy = BUSY.includes(status.state);
    stop.disabled = !busy || status.state === "cancelling";
    free.disabled = !["idle", "cancelled"].includes(status.state);
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
 * @param {string} [done] what to say then
 */
async function ask(route, done) {
  const answer = await api.fetchApi(route, { method: "POST" });
  const told = await answer.json();
  if (!answer.ok) {
    app.extensionManager.toast.add({ severity: "warn", summary: say("failed"), detail: told.error, life: 6000 });
  } else if (done) {
    app.extensionManager.toast.add({ severity: "success", summary: say(done), life: 3000 });
  }
}

function logView() {
  const choice = element("select.cp-choice", { "aria-label": say("log.of"), onchange: () => refresh() });
  const text = element("pre.cp-log", { tabindex: 0, role: "log", "aria-label": say("log") });
  const head = element("div.cp-line", {}, element("h3.cp-subtitle", {}, say("log")), choice);
  const view = element("div.cp-logs", {}, head, text);
  async function refresh() {
    const answer = await api.fetchApi(`/cp/logs?lines=200&rank=${choice.value}`);
    if (!answer.ok) return;
    const { lines } = await answer.json();
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < NEAR_PIXELS;
    write(text, lines.map((/** @type {{text: string}} */ line) => line.text).join("\n") || say("log.empty"));
    if (atEnd) text.scrollTop = text.scrollHeight;
  }
  const choose = (/** @type {number} */ ranks) => {
    if (choice.children.length === ranks + 1) return;
    const chosen = choice.value;
    const options = [...Array(ranks).keys()].map((rank) => element("option", { value: rank }, say("rank", { rank })));
    choice.replaceChildren(element("option", { value: "" }, say("log.all")), ...options);
    choice.value = Number(chosen) < ranks ? chosen : "";
  };
  return { view, refresh, choose };
}
