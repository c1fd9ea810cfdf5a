/** Toasts for what a user should hear at once: workers that died or did not start, and that there are workers again. */

import { app } from "../../scripts/app.js";
import { element } from "./elements.js";
import { openHelp } from "./help.js";
import { openPanel } from "./panel.js";
import { workerName } from "./rank.js";
import { FAILED, WORKING, follow, gpus, lastWords, reasonOf } from "./status.js";
import { say } from "./words.js";

/** @typedef {import("./status.js").Status} Status @typedef {{words: string, open: () => void}} Link */

const SECONDS = 1000;
const LOOK_MILLISECONDS = 250;
const GAP = 12; // pixels
const LINES = 3; // of a worker's last words
const LONGEST = 140; // characters of one
const ONE_GPU = "cp.one-gpu"; // in this browser's storage: the notice was shown

let number = 0;

export function startNotices() {
  /** @type {string | undefined} the last reason shown, or the one when this page opened */
  let lastReason;
  let isTold = true; // or the next workers are starting, which may fail for the same reason
  /** @type {() => void} */
  let dismiss = () => {};
  follow((now, before) => {
    const failed = FAILED.includes(now.state) && now.loss;
    if (lastReason === undefined) lastReason = failed ? now.reason : "";
    else if (failed && failed.settled && (lastReason !== now.reason || !isTold)) {
      [lastReason, isTold] = [now.reason, true];
      dismiss();
      dismiss = tell("error", title(now), detail(now), Infinity, links(now));
    } else if (lastReason && ["idle", "loading", ...WORKING].includes(now.state)) {
      lastReason = "";
      dismiss();
      tell("success", say("toast.recovered"), say("toast.recovered.detail"), 5 * SECONDS);
    }
    if (before.state !== now.state && now.state === "starting") {
      isTold = false;
      dismiss(); // of the next run
    }
    if (before.state !== "sampling" && now.state === "sampling" && now.world_size === 1) tellOfOneGpu();
  });
}

/** @param {Status} now */
function title(now) {
  if (now.state === "unstarted") return say("toast.unstarted");
  const lost = now.ranks.find(({ rank }) => rank === now.loss?.rank);
  return lost ? say("toast.died.rank", { worker: workerName(lost) }) : say("toast.died");
}

/**
 * The reason, and what the worker itself said last.
 * @param {Status} now
 */
function detail(now) {
  return [reasonOf(now), ...lastWords(now).slice(-LINES).map((line) => line.slice(0, LONGEST))].join("\n");
}

/**
 * @param {Status} now
 * @returns {Link[]}
 */
function links(now) {
  const panel = { words: say("toast.open"), open: openPanel };
  return now.help ? [panel, { words: say("toast.help"), open: () => openHelp(now.help) }] : [panel];
}

/** Once in this browser: what there is to gain on such a machine, and what not. */
function tellOfOneGpu() {
  if (gpus() !== 1 || localStorage.getItem(ONE_GPU)) return;
  localStorage.setItem(ONE_GPU, "told");
  tell("info", say("one.title"), say("one.hint"), 20 * SECONDS);
}

/**
 * @param {"error" | "success" | "info"} severity
 * @param {string} summary
 * @param {string} detail
 * @param {number} life milliseconds, or Infinity
 * @param {Link[]} [links] where they lead; to the panel unless said
 * @returns {() => void} what takes it away
 */
export function tell(severity, summary, detail, life, links = [{ words: say("toast.open"), open: openPanel }]) {
  const toasts = /** @type {any} */ (app.extensionManager.toast);
  if (toasts[severity]) { // from 1.58 or so on they hold a link themselves, and one alone
    const [link] = links;
    const action = link && { label: link.words, onClick: link.open };
    const id = toasts[severity](summary, { description: detail, duration: life, action });
    return () => toasts.dismiss(id);
  }
  keepClear();
  const message = { id: `cp-${++number}`, severity, summary, detail, life: Number.isFinite(life) ? life : undefined, styleClass: "cp-toast" };
  toasts.add(message);
  requestAnimationFrame(() => requestAnimationFrame(() => addLinks(summary, links)));
  return () => toasts.remove(message);
}

/** Toasts of the page are where ComfyUI says that a run failed, with a button: while ours are there they are below it. */
function keepClear() {
  let shown = false;
  const look = () => {
    const overlay = document.querySelector('[data-testid="error-overlay"]')?.getBoundingClientRect();
    const toasts = document.querySelector(".p-toast-top-right")?.getBoundingClientRect();
    const style = document.documentElement.style;
    const shifted = parseFloat(style.getPropertyValue("--cp-below")) || 0;
    const below = overlay && toasts ? Math.max(0, overlay.bottom + GAP - (toasts.top - shifted)) : 0;
    style.setProperty("--cp-below", `${below}px`);
    const ours = Boolean(document.querySelector(".cp-toast"));
    if (shown && !ours) clearInterval(timer);
    shown = ours;
  };
  const timer = setInterval(look, LOOK_MILLISECONDS);
  look();
}

/**
 * Older toasts hold text only: links are put under ours.
 * @param {string} summary
 * @param {Link[]} links
 */
function addLinks(summary, links) {
  for (const text of document.querySelectorAll(".p-toast-message-text")) {
    if (!text.querySelector(".p-toast-summary")?.textContent?.includes(summary) || text.querySelector(".cp-link")) continue;
    text.append(...links.map(({ words, open }) => element("button.cp-link", { type: "button", onclick: open }, words)));
  }
}
