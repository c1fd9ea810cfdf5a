/** Toasts for what a user should hear at once: a worker's death, and that there are workers again. */

import { app } from "../../scripts/app.js";
import { openPanel } from "./panel.js";
import { follow } from "./status.js";
import { say } from "./words.js";

const SECONDS = 1000;

export function startNotices() {
  let mourning = false;
  follow((now, before) => {
    if (now.state === "died" && before.state !== "died") {
      mourning = true;
      tell("error", say("toast.died"), now.reason, 20 * SECONDS);
    } else if (mourning && ["idle", "sampling", "loading"].includes(now.state)) {
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
 */
function tell(severity, summary, detail, life) {
  app.extensionManager.toast.add({ severity, summary, detail: `${detail}\n${say("toast.where")}`, life, group: undefined });
}
