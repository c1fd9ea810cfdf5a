/** CP Parallel Config says while it is edited what its values make, and turns red where they cannot work. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { element, setText } from "./elements.js";
import { foldLine } from "./fold.js";
import { cardName } from "./rank.js";
import { remedy } from "./remedy.js";
import { gpus } from "./status.js";
import { shares, terms } from "./shares.js";
import { say, translate } from "./words.js";

export const CONFIG = "CPParallelConfig";
const WIDGET = "cp_summary";
const EDIT_MILLISECONDS = 150;
const MIN_HEIGHT = 44; // pixels
const MAX_HEIGHT = 170;
const FRAME = 34; // around the text

/** @param {any} node a new CP Parallel Config */
export function addSummary(node) {
  const parts = {
    words: element("div.cp-what"), terms: element("div.cp-terms"), note: element("div.cp-hint"), out: element("div.cp-out"),
  };
  const fold = foldLine(node);
  const text = element("div.cp-words", { role: "status" }, parts.words, parts.terms, parts.note, parts.out);
  const place = element("div.cp-summary", {}, element("div.cp-verdict", {}, text), fold.line);
  const widget = node.addDOMWidget(WIDGET, "cp_summary", place, {
    serialize: false, hideInPanel: true, getMinHeight: () => height(text, fold.line), getValue: () => "", setValue() {},
  });
  widget.serialize = false; // also keep it out of the saved workflow, which knows widgets by their number
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => void summarise(node, parts, fold), EDIT_MILLISECONDS);
  };
  watch(node, later);
  after(node, "onConfigure", node.cpFold);
  later();
}

/**
 * Call `changed` for every edit: by hand, by a link, or by a loaded workflow.
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
export function after(owner, name, act) {
  const before = owner[name];
  owner[name] = function (/** @type {any[]} */ ...args) {
    const result = before?.apply(this, args);
    act();
    return result;
  };
}

/**
 * @param {any} node
 * @param {Record<string, HTMLElement>} parts
 * @param {{show: () => void}} fold
 */
async function summarise(node, parts, fold) {
  const linked = node.inputs?.some(
    (/** @type {any} */ slot, /** @type {number} */ index) => slot.widget && node.isInputConnected(index),
  );
  const values = Object.fromEntries(
    node.widgets.filter((/** @type {any} */ one) => one.name !== WIDGET).map((/** @type {any} */ one) => [one.name, one.value]),
  );
  const verdict = linked ? { words: say("config.linked") } : await fetchVerdict(values);
  setText(parts.words, verdict.words);
  setText(parts.terms, verdict.terms ?? "");
  setText(parts.note, verdict.note ?? "");
  parts.out.replaceChildren(...remedy(node, verdict.fix ?? [], () => {}));
  for (const part of Object.values(parts)) part.hidden = !part.textContent;
  parts.words.closest(".cp-summary")?.classList.toggle("cp-bad", Boolean(verdict.bad));
  frame(node, Boolean(verdict.bad));
  fold.show();
  app.canvas?.setDirty(true, true);
}

/**
 * LiteGraph reads the flag; Nodes 2.0 needs an event.
 * @param {any} node
 * @param {boolean} bad
 */
function frame(node, bad) {
  const oldValue = Boolean(node.has_errors);
  node.has_errors = bad;
  if (oldValue === bad) return;
  node.graph?.trigger("node:property:changed", { nodeId: node.id, property: "has_errors", oldValue, newValue: bad });
}

/**
 * @param {HTMLElement} text
 * @param {HTMLElement} line
 */
function height(text, line) {
  return Math.min(MAX_HEIGHT, Math.max(MIN_HEIGHT, text.offsetHeight + FRAME)) + line.offsetHeight;
}

/**
 * @typedef {{words: string, terms?: string, note?: string, bad?: boolean, fix?: import("./remedy.js").Change[]}} Verdict
 * @param {Record<string, any>} values
 * @returns {Promise<Verdict>}
 */
async function fetchVerdict(values) {
  const answer = await api.fetchApi("/cp/check", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values),
  });
  const plan = await answer.json();
  if (plan.code) return { words: translate(plan), bad: true, fix: plan.fix };
  const degrees = Object.fromEntries(Object.keys(plan.degrees).map((name) => [name, values[name]]));
  const { workers, cores } = plan;
  const cpu = plan.devices[0] === "cpu";
  const summary = { words: shares(degrees, workers, cpu), terms: "" };
  if (workers > 1) summary.terms = say("workers", { degrees: terms(degrees), count: workers });
  if (values.nnodes > 1) summary.terms += ` ${say("machines", { count: values.nnodes })}`;
  const parts = plan.shares.map(shareText).join(", ");
  summary.terms = [summary.terms, parts].filter(Boolean).join("; ");
  const note = cpu && workers > 1 ? say("config.cores", { workers, cores }) : gpus() === 1 && workers === 1 ? say("one.hint") : "";
  return { ...summary, note };
}

/**
 * @param {[string, number]} share a device, and its percent of the work
 * @param {number} rank
 */
function shareText([device, percent], rank) {
  return say("config.share", { worker: cardName({ rank, device }), percent });
}
