/** CP Parallel Config says while it is edited what its values make, and turns red where they cannot work. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { element, setText } from "./elements.js";
import { FOLD, defaultsOf, foldLine, isLinked, valuesOf } from "./fold.js";
import { gpuChoice } from "./gpus.js";
import { after } from "./graph.js";
import { isApproximate, presetChoice } from "./presets.js";
import { cardName } from "./rank.js";
import { remedy, setValues } from "./remedy.js";
import { follow, gpus } from "./status.js";
import { product, shares } from "./shares.js";
import { addElementWidget } from "./widgets.js";
import { say, translate } from "./words.js";

const EDIT_MILLISECONDS = 150;
const MARGIN = 6; // pixels around each of our elements
const LEAST = 24;
const HIGH_CACHE = 0.3;

/** @param {any} node a new CP Parallel Config */
export function addSummary(node) {
  const parts = {
    words: element("div.cp-what"), terms: element("div.cp-terms"), note: element("div.cp-hint"), out: element("div.cp-out"),
  };
  const fold = foldLine(node);
  const defaults = defaultsOf(node);
  const preset = presetChoice((values) => setValues(node, values), defaults);
  const gpus = gpuChoice((devices) => setValues(node, { devices }));
  const verdict = element("div.cp-verdict", { role: "status" }, parts.words, parts.terms, parts.note, parts.out);
  const head = element("div.cp-summary", {}, verdict, gpus.element, preset.element);
  const widgets = [addFixed(node, "cp_summary", head), addFixed(node, FOLD, fold.line)];
  node.widgets.unshift(...node.widgets.splice(node.widgets.indexOf(widgets[0]), 1)); // what is wrong is read first
  keepPlaces(node, fold.savedHeight);
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const show = () => {
    const values = valuesOf(node);
    gpus.show(String(values.devices ?? ""), isLinked(node, "devices"));
    preset.show(values);
    fold.show();
  };
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => void summarise(node, parts).then(show), EDIT_MILLISECONDS);
    show();
  };
  after(node, "onRemoved", follow((status, before) => {
    if (before.state === "unknown" && status.state !== "unknown") later(); // ComfyUI is there again
  }));
  after(node, "onConfigure", node.cpFold);
  watch(node, later);
  later();
}

/**
 * A widget that is as high as its content.
 * @param {any} node
 * @param {string} name
 * @param {HTMLElement} content
 */
function addFixed(node, name, content) {
  let shown = LEAST;
  const widget = addElementWidget(node, name, element("div", {}, content), { margin: MARGIN });
  widget.computeLayoutSize = undefined; // else Nodes 2.0 gives it a part of what a larger node has left
  widget.computeSize = (/** @type {number} */ width) => {
    if (content.offsetWidth) shown = content.offsetHeight; // not before it is drawn
    return [width, shown + 2 * MARGIN];
  };
  new ResizeObserver(node.cpFold).observe(content);
  return widget;
}

/**
 * A saved workflow has the height of the folded node, and the values in the order of its inputs: LiteGraph leaves a gap for a
 * widget that is not saved, and reads without it.
 * @param {any} node
 * @param {() => number} savedHeight
 */
function keepPlaces(node, savedHeight) {
  const before = node.onSerialize;
  node.onSerialize = function (/** @type {any} */ saved) {
    before?.call(this, saved);
    saved.widgets_values = Object.values(valuesOf(this));
    saved.size = [saved.size[0], savedHeight()];
  };
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
  for (const widget of node.widgets) if (widget.serialize !== false) after(widget, "callback", changed);
}

/**
 * Answers come in any order: only that to the last question counts.
 * @param {any} node
 * @param {Record<string, HTMLElement>} parts
 */
async function summarise(node, parts) {
  const question = node.cpQuestion = {};
  const values = valuesOf(node);
  const linked = node.widgets.some((/** @type {any} */ widget) => isLinked(node, widget.name));
  /** @type {Verdict} */
  const verdict = linked ? { words: say("config.linked") } : await fetchVerdict(values).catch(() => ({ words: say("state.unknown") }));
  if (node.cpQuestion !== question) return;
  const approximate = !verdict.bad && isApproximate(values, defaultsOf(node)) ? say("approximate.hint") : "";
  const high = !verdict.bad && values.step_cache > HIGH_CACHE ? say("cache.high", { share: values.step_cache }) : "";
  setText(parts.words, verdict.words);
  setText(parts.terms, verdict.terms ?? "");
  setText(parts.note, [approximate, high, verdict.note].filter(Boolean).join(" "));
  parts.out.replaceChildren(...remedy(node, verdict.fix ?? [], () => {}));
  for (const part of Object.values(parts)) part.hidden = !part.textContent;
  parts.words.closest(".cp-summary")?.classList.toggle("cp-bad", Boolean(verdict.bad));
  frame(node, Boolean(verdict.bad));
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
  const { degrees, workers, cores } = plan;
  const cpu = plan.devices[0] === "cpu";
  const parts = plan.shares.map(shareText).join(", ");
  const split = [product(degrees, workers, values.nnodes), parts].filter(Boolean).join("; ");
  const note = cpu && workers > 1 ? say("config.cores", { workers, cores }) : gpus() === 1 && workers === 1 ? say("one.hint") : "";
  return { words: shares(degrees, workers, cpu), terms: split, note };
}

/**
 * @param {[string, number]} share a device, and its percent of the work
 * @param {number} rank
 */
function shareText([device, percent], rank) {
  return say("config.share", { worker: cardName({ rank, device }), percent });
}
