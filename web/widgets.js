/** Widgets of our own elements on a node, which no workflow saves. */

let number = 0;

/**
 * Nodes 2.0 keeps the element that it shows while name and type of the widget stay, and an undone graph has new nodes under the
 * same numbers: so each has a type of its own.
 * @param {any} node
 * @param {string} name
 * @param {HTMLElement} place
 * @param {Record<string, unknown>} options
 */
export function addElementWidget(node, name, place, options) {
  const widget = node.addDOMWidget(name, `${name}_${++number}`, place, {
    serialize: false, hideInPanel: true, getValue: () => "", setValue() {}, ...options,
  });
  widget.serialize = false;
  return widget;
}
