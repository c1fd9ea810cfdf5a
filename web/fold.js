/** Which widgets of a CP Parallel Config show: the first three, those that differ from the preset, and on a click the others. */

import { app } from "../../scripts/app.js";
import { element, setText } from "./elements.js";
import { isListed } from "./gpus.js";
import { ADJUSTABLE, PRESETS, presetOf } from "./presets.js";
import { say } from "./words.js";

/** @typedef {any} LGraphNode */

const LOW = 120; // pixels: Nodes 2.0 makes a node as high as what it shows, and never lower than its size
const RENDERER = "Comfy.VueNodes.Enabled.change";
/** @type {Record<string, string>} widgets that mean something only where another one is above 1 */
const NEEDS_MORE_OF = { rdzv_endpoint: "nnodes", warmup_steps: "patches" };

/**
 * @param {LGraphNode} node
 * @returns {{line: HTMLElement, show: () => void}} the line to click, and what looks at the values again
 */
export function foldLine(node) {
  const line = element("button.cp-fold", { type: "button", onclick: () => toggle() });
  const defaults = defaultsOf(node);
  const folded = node.widgets.filter((/** @type {any} */ widget) => widget.options?.advanced);
  for (const widget of folded) widget.advanced = widget.options.advanced = false; // else Nodes 2.0 folds them too, all or none
  let open = false;
  /** @type {string | undefined} the widgets that showed last */
  let lastShown;
  const toggle = () => {
    open = !open;
    show();
  };
  const show = (mayShrink = true) => {
    const values = valuesOf(node);
    const preset = PRESETS[presetOf(values, defaults)];
    const visible = (/** @type {any} */ widget) => {
      if (isLinked(node, widget.name)) return true;
      if (widget.name === "devices") return open || !isListed(String(widget.value ?? ""));
      if (!folded.includes(widget)) return true;
      const usual = ADJUSTABLE.includes(widget.name) ? undefined : preset[widget.name];
      if (widget.value !== (usual ?? defaults[widget.name])) return true;
      const other = NEEDS_MORE_OF[widget.name];
      return other ? Number(values[other]) > 1 : open;
    };
    const hidden = node.widgets.filter((/** @type {any} */ widget) => widget.serialize !== false && !visible(widget));
    for (const widget of node.widgets) widget.hidden = widget.options.hidden = hidden.includes(widget);
    const more = hidden.filter((/** @type {any} */ widget) => !NEEDS_MORE_OF[widget.name]).length;
    setText(line, open ? `▾ ${say("fold.less")}` : `▸ ${say("fold.more", { count: more })}`);
    line.setAttribute("aria-expanded", String(open));
    const names = hidden.map((/** @type {any} */ widget) => widget.name).join();
    fit(node, lastShown !== names, mayShrink);
    lastShown = names;
  };
  node.cpFold = () => show(false);
  return { line, show };
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
  const saved = node.widgets.filter((/** @type {any} */ widget) => widget.serialize !== false);
  return Object.fromEntries(saved.map((/** @type {any} */ widget) => [widget.name, widget.value]));
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
 * Room for what it shows. After an edit that changed which widgets show it has no more; a loaded or larger size stays.
 * @param {LGraphNode} node
 * @param {boolean} changed
 * @param {boolean} mayShrink
 */
function fit(node, changed, mayShrink) {
  if (changed) node.widgets.push(...node.widgets.splice(0)); // Nodes 2.0 looks at them again when the list changes
  if (/** @type {any} */ (LiteGraph).vueNodesMode) {
    if (changed && mayShrink) node.setSize([node.size[0], LOW]);
    return;
  }
  const needed = node.computeSize()[1];
  if ((changed && mayShrink) || node.size[1] < needed) node.setSize([node.size[0], needed]);
  node.setDirtyCanvas?.(true, true);
}
