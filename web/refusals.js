/** A run that was refused: says why in the user's language, and leads to the node whose values have to change. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { CONFIG } from "./config.js";
import { tell } from "./notices.js";
import { nodeOf } from "./onnode.js";
import { REMEDIED } from "./remedy.js";
import { say, translate } from "./words.js";

const SECONDS = 1000;
const LOOK_MILLISECONDS = 50;
const DISMISS = '[data-testid="error-overlay-dismiss"]';

/** @typedef {any} LGraphNode */

/**
 * What nodes/describe/refused_event.py sends. `widget` and `fix` are of a CP Parallel Config.
 * @typedef {{node_id: string, code: string, values: Record<string, any>, widget: string | null, fix: Record<string, any>}} Refusal
 */

export function startRefusals() {
  /** @type {() => void} */
  let dismiss = () => {};
  const runs = /** @type {EventTarget} */ (api);
  runs.addEventListener("execution_start", () => dismiss());
  document.addEventListener(REMEDIED, () => dismiss());
  runs.addEventListener("cp.refused", (event) => {
    /** @type {Refusal} */
    const refusal = /** @type {CustomEvent<any>} */ (event).detail;
    const refused = nodeOf(String(refusal.node_id));
    if (!refused) return;
    const target = toChange(refused, refusal);
    const link = { words: say("toast.node", { node: target.title }), open: () => show(target) };
    dismiss();
    dismiss = tell("error", say("toast.refused"), translate(refusal), 20 * SECONDS, [link]);
    takeBack();
  });
}

/** ComfyUI says of every failed run that a node failed. Ours says why, and one message is enough. It is taken back once,
 * and not where one is there already: that, and what comes after, is about other errors too. */
function takeBack() {
  const button = () => /** @type {HTMLElement | null} */ (document.querySelector(DISMISS));
  if (button()) return;
  const timer = setInterval(() => {
    const dismiss = button();
    if (!dismiss) return;
    clearInterval(timer);
    dismiss.click();
  }, LOOK_MILLISECONDS);
  setTimeout(() => clearInterval(timer), 2 * SECONDS);
}

/**
 * The nearest CP Parallel Config above the node, where its widgets are to change; else the node itself.
 * @param {LGraphNode} refused
 * @param {Refusal} refusal
 */
function toChange(refused, { widget, fix }) {
  const config = widget || Object.keys(fix).length ? upstream(refused).find((node) => node.comfyClass === CONFIG) : undefined;
  return config ?? refused;
}

/**
 * Nearest first, `node` not among them.
 * @param {LGraphNode} node
 * @returns {LGraphNode[]}
 */
export function upstream(node) {
  const visited = new Set([node]);
  for (const one of visited) {
    for (const index of (one.inputs ?? []).keys()) {
      const origin = one.getInputNode(index);
      if (origin) visited.add(origin);
    }
  }
  return [...visited].slice(1);
}

/** @param {LGraphNode} node */
function show(node) {
  const { canvas } = app;
  if (canvas.graph !== node.graph) canvas.setGraph(node.graph);
  canvas.deselectAll();
  canvas.select(node);
  canvas.centerOnNode(node);
}
