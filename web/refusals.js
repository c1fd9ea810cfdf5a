/** A run that was refused: finds the node whose values the refusal is about, and leads there. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { CONFIG } from "./config.js";
import { tell } from "./notices.js";
import { nodeOf } from "./onnode.js";
import { literal } from "./understood.js";
import { say, translated } from "./words.js";

const REFUSED = ".errors.Refused";
const SECONDS = 1000;
const LOOK_MILLISECONDS = 50;
const DISMISS = '[data-testid="error-overlay-dismiss"]';

/** @typedef {any} LGraphNode */

export function startRefusals() {
  /** @type {() => void} */
  let dismiss = () => {};
  const runs = /** @type {EventTarget} */ (api);
  runs.addEventListener("execution_start", () => dismiss());
  runs.addEventListener("execution_error", (event) => {
    const { node_id, exception_type, exception_message } = /** @type {CustomEvent<any>} */ (event).detail;
    const refused = exception_type.endsWith(REFUSED) && nodeOf(String(node_id));
    if (!refused) return;
    const meant = toChange(refused, exception_message);
    const link = { words: say("toast.node", { node: meant.title }), open: () => show(meant) };
    dismiss();
    dismiss = tell("error", say("toast.refused"), translated(exception_message.trim()), 20 * SECONDS, [link]);
    takeBack();
  });
}

/** ComfyUI says of every failed run that a node failed. Ours says why, and one message is enough. */
function takeBack() {
  const look = () => /** @type {HTMLElement | null} */ (document.querySelector(DISMISS))?.click();
  const timer = setInterval(look, LOOK_MILLISECONDS);
  setTimeout(() => clearInterval(timer), 2 * SECONDS);
}

/**
 * The node above that has what the reason names: a config's widget, or the node's own name. Else the one that refused.
 * @param {LGraphNode} refused
 * @param {string} reason
 */
function toChange(refused, reason) {
  const above = upstream(refused);
  const says = (/** @type {string} */ name) => Boolean(name) && new RegExp(`(?<!\\w)${literal(name)}(?!\\w)`).test(reason);
  const config = above.find((node) => node.comfyClass === CONFIG && node.widgets.some((/** @type {any} */ one) => says(one.name)));
  return config ?? above.find((node) => says(node.title) || says(node.type)) ?? refused;
}

/**
 * Nearest first, `node` not among them.
 * @param {LGraphNode} node
 * @returns {LGraphNode[]}
 */
export function upstream(node) {
  const found = new Set([node]);
  for (const one of found) {
    for (const index of (one.inputs ?? []).keys()) {
      const origin = one.getInputNode(index);
      if (origin) found.add(origin);
    }
  }
  return [...found].slice(1);
}

/** @param {LGraphNode} node */
function show(node) {
  const { canvas } = app;
  if (canvas.graph !== node.graph) canvas.setGraph(node.graph);
  canvas.deselectAll();
  canvas.select(node);
  canvas.centerOnNode(node);
}
