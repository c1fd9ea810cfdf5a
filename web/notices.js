/** Toasts for what a user should hear at once: a worker's death, and that there are workers again. */

import { app } from "../../scripts/app.js";
import { element } from "./elements.js";
import { openPanel } from "./panel.js";
import { WORKING, follow, now as current } from "./status.js";
import { say } from "./words.js";

const SECONDS = 1000;
const CAUSE_MILLISECONDS = 1500; // how a worker ended is known a moment after that it did

export function startNotices() {
  let mourning = false;
  let cause = "";
  follow((now, before) => {
    cause = now.state === "died" ? now.reason : cause;
    if (now.state === "died" && before.state !== "died") {
      mourning = true;
      const title = before.state === "starting" ? say("toast.unstarted") : say("toast.died");
      setTimeout(() => tell("error", title, cause || current().reason, 20 * SECONDS), CAUSE_MILLISECONDS);
    } else if (mourning && ["idle", "loading", ...WORKING].includes(now.state)) {
      mourning = false;
      tell("success", say("toast.recovered"), say("toast.recovered.detail"), 5 * SECONDS);
    }
  });
}

/**
 * @param {"error" | "success"} severity
 * @param {string} summary
 * @param {string} detail
 * @param {number} life milliseconds
 * @param {{words: string, open: () => void}} [link] where it leads; to the panel unless said
 */
export function tell(severity, summary, detail, life, link = { words: say("toast.open"), open: openPanel }) {
  const toasts = /** @type {any} */ (app.extensionManager.toast); // from 1.58 or so on they hold a link themselves
  if (toasts[severity]) {
    toasts[severity](summary, { description: detail, duration: life, action: { label: link.words, onClick: link.open } });
    return;
  }
  toasts.add({ severity, summary, detail, life });
  requestAnimationFrame(() => requestAnimationFrame(() => addLink(summary, link)));
}

/**
 * Older toasts hold text only: a link is put under ours.
 * @param {string} summary
 * @param {{words: string, open: () => void}} link
 */
function addLink(summary, { words, open }) {
  for (const text of document.querySelectorAll(".p-toast-message-text")) {
    if (!text.querySelector(".p-toast-summary")?.textContent?.includes(summary) || text.querySelector(".cp-link")) continue;
    text.append(element("button.cp-link", { type: "button", onclick: open }, words));
  }
}
