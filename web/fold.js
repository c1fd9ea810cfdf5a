/** Which widgets of a CP Parallel Config show: the first three, those that differ from the preset, and on a click the others. */

import { app } from "../../scripts/app.js";
import { element, setText } from "./elements.js";
import { isListed } from "./gpus.js";
import { ADJUSTABLE, PRESETS, presetOf } from "./presets.js";
import { say } from "./words.js";

/** @typedef {import("./graph.js").LGraphNode} LGraphNode */

export const FOLD = "cp_fold"; // the widget with the line
const LOW = 120; // pixels, less than it ever needs
const RENDERER = "Comfy.VueNodes.Enabled.change";
/** @type {Record<string, string>} widgets that mean something only where another one is above 1 */
const NEEDS_MORE_OF = { rdzv_endpoint: "nnodes", warmup_steps: "patches" };

/**
 * `line` is what to click, `show` looks at the values again, and `savedHeight` is the node's height without the other widgets:
 * opening them is no change of the workflow.
 * @param {LGraphNode} node
 * @returns {{line: HTMLElement, show: () => void, savedHeight: () => number}}
 */
export function foldLine(node) {
  const line = element("button.cp-fold", { type: "button", onclick: () => toggle() });
  const defaults = defaultsOf(node);
  const advanced = node.widgets.filter((/** @type {any} */ widget) => widget.options?.advanced);
  for (const widget of advanced) widget.advanced = widget.options.advanced = false; // else Nodes 2.0 folds them too, all or none
  const folded = advanced.map((/** @type {any} */ { name }) => name);
  let open = false;
  let closed = { height: 0, hidden: "" }; // as it was before it was opened
  /** @type {string | undefined} names of the widgets that were hidden last */
  let lastHidden;
  const hiddenNames = () => {
    const values = valuesOf(node);
    const preset = PRESETS[presetOf(values, defaults)] ?? {};
    const visible = (/** @type {any} */ { name, value }) => {
      if (isLinked(node, name)) return true;
      if (name === "devices") return open || !isListed(String(value ?? ""));
      if (!folded.includes(name)) return true;
      const usual = ADJUSTABLE.includes(name) ? undefined : preset[name];
      if (value !== (usual ?? defaults[name])) return true;
      const other = NEEDS_MORE_OF[name];
      return other ? Number(values[other]) > 1 : open;
    };
    return savedWidgets(node).filter((widget) => !visible(widget)).map(({ name }) => name);
  };
  const savedHeight = () => (open ? Math.min(closed.height, node.size[1]) : node.size[1]);
  const toggle = () => {
    const height = savedHeight();
    open = !open;
    if (open) closed = { height, hidden: lastHidden ?? "" };
    const at = node.widgets.findIndex((/** @type {any} */ widget) => widget.name === FOLD);
    node.widgets.splice(open ? 1 : node.widgets.length, 0, ...node.widgets.splice(at, 1)); // in sight, below the summary
    show(open ? node.size[1] : hiddenNames().join() === closed.hidden ? height : LOW);
  };
  /** @param {number} [height] what it has at least; without, it is low after an edit that changed which widgets show */
  const show = (height) => {
    const hidden = hiddenNames();
    const changed = hidden.join() !== lastHidden;
    lastHidden = hidden.join();
    for (const widget of node.widgets) widget.hidden = widget.options.hidden = hidden.includes(widget.name);
    if (changed) node.widgets.push(...node.widgets.splice(0)); // Nodes 2.0 looks at them again when the list changes
    const more = hidden.filter((name) => !NEEDS_MORE_OF[name]).length;
    setText(line, open ? `▾ ${say("fold.less")}` : `▸ ${say("fold.more", { count: more })}`);
    line.setAttribute("aria-expanded", String(open));
    fit(node, height ?? (!changed ? node.size[1] : open ? closed.height : LOW));
  };
  node.cpFold = () => show(node.size[1]);
  return { line, show: () => show(), savedHeight };
}

/** The other renderer needs another height for the same widgets. */
export function followRenderer() {
  /** @type {any} */ (app.ui.settings).addEventListener(RENDERER, () =>
    setTimeout(() => (app.graph?.nodes ?? []).forEach((/** @type {any} */ node) => node.cpFold?.())));
}

/**
 * The values that are saved, by the widgets' names.
 * @param {LGraphNode} node
 * @returns {Record<string, any>}
 */
export function valuesOf(node) {
  return Object.fromEntries(savedWidgets(node).map((widget) => [widget.name, widget.value]));
}

/**
 * @param {LGraphNode} node
 * @returns {any[]}
 */
function savedWidgets(node) {
  return node.widgets.filter((/** @type {any} */ widget) => widget.serialize !== false);
}

/**
 * @param {LGraphNode} node
 * @returns {Record<string, any>} by the widgets' names
 */
export function defaultsOf(node) {
  const { required = {}, optional = {} } = node.constructor.nodeData?.input ?? {};
  return Object.fromEntries(Object.entries({ ...required, ...optional }).map(([name, [, options]]) => [name, options?.default]));
}

/**
 * @param {LGraphNode} node
 * @param {string} name of a widget
 */
export function isLinked(node, name) {
  return Boolean(node.inputs?.some((/** @type {any} */ slot) => slot.widget?.name === name && slot.link != null));
}

/**
 * This height, or as much as its widgets need: LiteGraph has to be told, Nodes 2.0 does it by itself.
 * @param {LGraphNode} node
 * @param {number} height
 */
function fit(node, height) {
  const needed = /** @type {any} */ (LiteGraph).vueNodesMode ? 0 : node.computeSize()[1];
  const fitting = Math.max(height, needed);
  if (fitting !== node.size[1]) node.setSize([node.size[0], fitting]);
  node.setDirtyCanvas?.(true, true);
}
