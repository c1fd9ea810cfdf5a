/** CP Parallel Config says while it is edited how many workers its values make, and turns red where they cannot. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { element, write } from "./elements.js";
import { say } from "./words.js";

export const CONFIG = "CPParallelConfig";
const WIDGET = "cp_summary";
const EDIT_MILLISECONDS = 150;
const LEAST = 44; // pixels
const MOST = 170;
const FRAME = 34; // around the text

/** @param {any} node a new CP Parallel Config */
export function addSummary(node) {
  const text = element("div.cp-words", { role: "status" });
  const widget = node.addDOMWidget(WIDGET, "cp_summary", element("div.cp-summary", {}, text), {
    serialize: false, getMinHeight: () => height(text), getValue: () => "", setValue() {},
  });
  widget.serialize = false; // of the saved workflow too: widgets there are known by their number
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => void summarise(node, text), EDIT_MILLISECONDS);
  };
  if (findsHeight()) node.setSize([node.size[0], MOST]);
  watch(node, later);
  later();
}

/**
 * Call `changed` for every edit, from wherever: a hand, a link, a loaded workflow.
 * @param {any} node
 * @param {() => void} changed
 */
function watch(node, changed) {
  after(node, "onWidgetChanged", changed);
  after(node, "onConnectionsChange", changed);
  after(node, "onConfigure", changed);
  for (const widget of node.widgets) if (widget.name !== WIDGET) after(widget, "callback", changed);
}

/**
 * @param {any} owner
 * @param {string} name
 * @param {() => void} act
 */
function after(owner, name, act) {
  const before = owner[name];
  owner[name] = function (/** @type {any[]} */ ...given) {
    const result = before?.apply(this, given);
    act();
    return result;
  };
}

/**
 * @param {any} node
 * @param {HTMLElement} text
 */
async function summarise(node, text) {
  const linked = node.inputs?.some(
    (/** @type {any} */ slot, /** @type {number} */ index) => slot.widget && node.isInputConnected(index),
  );
  const values = Object.fromEntries(
    node.widgets.filter((/** @type {any} */ one) => one.name !== WIDGET).map((/** @type {any} */ one) => [one.name, one.value]),
  );
  const [words, bad] = linked ? [say("config.linked"), false] : await judged(values);
  write(text, words);
  text.title = words;
  text.parentElement?.classList.toggle("cp-bad", bad);
  node.has_errors = bad;
  grow(node);
  app.canvas?.setDirty(true, true);
}

/** @param {HTMLElement} text */
function height(text) {
  return Math.min(MOST, Math.max(LEAST, text.offsetHeight + FRAME));
}

/** Nodes 2.0 finds a node's height itself, and folds widgets that LiteGraph counts. */
function findsHeight() {
  return Boolean(/** @type {any} */ (LiteGraph).vueNodesMode);
}

/**
 * Never smaller: its size is the user's.
 * @param {any} node
 */
function grow(node) {
  if (findsHeight()) return;
  const needed = node.computeSize()[1];
  if (node.size[1] < needed) node.setSize([node.size[0], needed]);
}

/**
 * @param {Record<string, any>} values
 * @returns {Promise<[string, boolean]>} what to say, and whether it cannot work
 */
async function judged(values) {
  const answer = await api.fetchApi("/cp/check", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values),
  });
  const found = await answer.json();
  const reason = found.error ?? found.reason;
  if (reason) return [reason, true];
  const degrees = ["ring", "ulysses", "cfg", "data"]
    .map((name) => `${name} ${values[`${name}_degree`] || say("auto")}`)
    .join(" x ");
  const shares = found.shares.map(shared).join(", ");
  return [[made(values, found, degrees), shares].filter(Boolean).join("; "), false];
}

/**
 * @param {Record<string, any>} values
 * @param {any} found
 * @param {string} degrees
 */
function made(values, found, degrees) {
  if (values.nnodes > 1) return say("config.machines", { degrees, workers: found.workers, nnodes: values.nnodes });
  const onCpu = found.workers === 1 ? "config.cpu.one" : "config.cpu";
  const key = found.devices[0] === "cpu" ? onCpu : "config.equals";
  return say(key, { degrees, workers: found.workers, gpus: found.gpus });
}

/**
 * @param {[string, number]} share a device, and its percent of the work
 * @param {number} rank
 */
function shared([device, percent], rank) {
  const [kind, index] = device.split(":");
  return say("config.share", { worker: kind === "cpu" ? say("rank", { rank }) : `GPU ${index}`, percent });
}
