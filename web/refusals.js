/** A run that was refused: says why in the user's language, and leads to the node whose values have to change. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { configAbove, nodeOf } from "./graph.js";
import { tell } from "./notices.js";
import { isOpen, known } from "./prompts.js";
import { REMEDIED } from "./remedy.js";
import { say, translate } from "./words.js";

const SECONDS = 1000;
const LOOK_MILLISECONDS = 50;
const LOOKS = 40;
const DISMISS = '[data-testid="error-overlay-dismiss"]';

/** @typedef {import("./graph.js").LGraphNode} LGraphNode */

/**
 * What nodes/describe/host.py sends. `widget` and `fix` are of a CP Parallel Config.
 * @typedef {{prompt_id: string, node_id: string, code: string, values: Record<string, any>, widget: string | null, fix: Record<string, any>}} Refusal
 */

export function startRefusals() {
  /** @type {() => void} */
  let dismiss = () => {};
  // ComfyUI says of every failed run that a node failed. Ours says why, and one message is enough: it is taken back once, and
  // not where one is there already, which is about other errors too.
  let unwanted = false;
  const runs = /** @type {EventTarget} */ (api);
  runs.addEventListener("execution_start", () => {
    unwanted = false;
    dismiss();
  });
  runs.addEventListener("execution_error", () => {
    if (unwanted) takeBack();
    unwanted = false;
  });
  document.addEventListener(REMEDIED, () => dismiss());
  runs.addEventListener("cp.refused", async (event) => {
    /** @type {Refusal} */
    const refusal = /** @type {CustomEvent<any>} */ (event).detail;
    unwanted = !overlayButton();
    await known();
    const refused = isOpen(refusal.prompt_id) ? nodeOf(String(refusal.node_id)) : undefined;
    const target = refused && toChange(refused, refusal);
    const links = target ? [{ words: say("toast.node", { node: target.title }), open: () => show(target) }] : undefined;
    dismiss();
    dismiss = tell("error", say("toast.refused"), translate(refusal), 20 * SECONDS, links);
  });
}

/** The button of ComfyUI's message that a node failed. */
function overlayButton() {
  return /** @type {HTMLElement | null} */ (document.querySelector(DISMISS));
}

/** It is drawn soon after its event; looks are counted, since a busy page draws late. */
function takeBack() {
  let looks = 0;
  const timer = setInterval(() => {
    const button = overlayButton();
    button?.click();
    if (button || ++looks === LOOKS) clearInterval(timer);
  }, LOOK_MILLISECONDS);
}

/**
 * The nearest CP Parallel Config above the node, where its widgets are to change; else the node itself.
 * @param {LGraphNode} refused
 * @param {Refusal} refusal
 */
function toChange(refused, { widget, fix }) {
  return (widget || Object.keys(fix).length ? configAbove(refused) : undefined) ?? refused;
}

/** @param {LGraphNode} node */
function show(node) {
  const { canvas } = app;
  if (canvas.graph !== node.graph) canvas.setGraph(node.graph);
  canvas.deselectAll();
  canvas.select(node);
  canvas.centerOnNode(node);
}
