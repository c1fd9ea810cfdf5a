/** Widgets that few people need, behind one line; open by itself where one of them says something unusual.
 *
 * Nodes 2.0 has such a line of its own for what the node calls advanced; LiteGraph shows everything.
 */

import { app } from "../../scripts/app.js";
import { element, setText } from "./elements.js";
import { say } from "./words.js";

/** @typedef {any} LGraphNode */

const LOW = 120; // pixels: Nodes 2.0 makes a node as high as what it shows, and never lower than its size
const RENDERER = "Comfy.VueNodes.Enabled.change";

/**
 * @param {LGraphNode} node
 * @returns {{line: HTMLElement, show: () => void}} the line, and what looks at the values again
 */
export function foldLine(node) {
  const line = element("button.cp-fold", { type: "button", onclick: () => toggle() });
  /** @type {boolean | undefined} what the user chose */
  let chosen;
  /** @type {string | undefined} how it was drawn last */
  let lastLayout;
  const toggle = () => {
    chosen = !open();
    show();
  };
  const open = () => chosen ?? folded(node).some((/** @type {any} */ widget) => unusual(node, widget));
  const show = () => {
    const vueNodes = Boolean(/** @type {any} */ (LiteGraph).vueNodesMode); // the page's own line is there
    const shown = open();
    const widgets = folded(node);
    for (const widget of widgets) widget.hidden = !vueNodes && !shown;
    if (shown && !node.showAdvanced && vueNodes) node.showAdvanced = true;
    line.hidden = vueNodes || !widgets.length;
    line.setAttribute("aria-expanded", String(shown));
    setText(line, shown ? `▾ ${say("fold.less")}` : `▸ ${say("fold.more", { count: widgets.length })}`);
    if (!vueNodes) fit(node, shown);
    else if (lastLayout !== `${vueNodes} ${shown}` && !shown) node.setSize([node.size[0], LOW]);
    lastLayout = `${vueNodes} ${shown}`;
  };
  node.cpFold = () => {
    lastLayout = undefined;
    show();
  };
  show();
  return { line, show };
}

/** Each renderer folds in its own way. */
export function followRenderer() {
  /** @type {any} */ (app.ui.settings).addEventListener(RENDERER, () =>
    setTimeout(() => (app.graph?.nodes ?? []).forEach((/** @type {any} */ node) => node.cpFold?.())));
}

/**
 * ComfyUI makes a loaded node as high as all of its widgets would need.
 * @param {LGraphNode} node
 */
export function foldLoaded(node) {
  node.cpFold?.();
}

/** @param {LGraphNode} node */
function folded(node) {
  return (node.widgets ?? []).filter((/** @type {any} */ widget) => widget.options?.advanced);
}

/**
 * Another value than usual, or one from another node.
 * @param {LGraphNode} node
 * @param {any} widget
 */
function unusual(node, widget) {
  const { required = {}, optional = {} } = node.constructor.nodeData?.input ?? {};
  const usual = (required[widget.name] ?? optional[widget.name])?.[1]?.default;
  const linked = node.inputs?.some((/** @type {any} */ slot) => slot.widget?.name === widget.name && slot.link != null);
  return linked || (usual !== undefined && widget.value !== usual);
}

/**
 * Room for what it shows. Folded it has no more; open, a user's larger size stays.
 * @param {LGraphNode} node
 * @param {boolean} shown
 */
function fit(node, shown) {
  const needed = node.computeSize()[1];
  if (node.size[1] < needed || !shown) node.setSize([node.size[0], needed]);
  node.setDirtyCanvas?.(true, true);
}
