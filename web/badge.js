/** The state at a glance, in the top bar; a click opens the panel. */

import { app } from "../../scripts/app.js";
import { stateText, openPanel } from "./panel.js";
import { follow, now, reasonOf } from "./status.js";
import { say } from "./words.js";

const CELL = "cpSamplerState"; // on ComfyUI's own reactive store: what is read there is drawn again when it changes

export function startBadge() {
  const tell = () => Object.assign(app.extensionManager, { [CELL]: `${now().state} ${stateText(now())}` });
  follow(tell);
  tell();
}

/** What the top bar shows now. */
export function badge() {
  const cell = /** @type {any} */ (app.extensionManager)?.[CELL];
  if (cell === undefined) return [];
  const { state } = now();
  const words = stateText(now());
  const reason = reasonOf(now());
  const tooltip = [`${say("title")}: ${words}`, reason].filter(Boolean).join(". ");
  return [{ icon: "icon-[lucide--cpu]", label: words, tooltip, class: `cp-badge cp-badge-${state}`, onClick: openPanel }];
}
