/** Elements of the page, made in one expression. Knows nothing of workers. */

/**
 * @param {string} tag with classes, such as "div.cp-row"
 * @param {Record<string, string | number | EventListener>} [properties] attributes, and listeners as onclick
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function element(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  made.classList.add(...classes);
  return applyProperties(made, properties, children);
}

/**
 * An SVG element, made in one expression.
 * @param {string} tag
 * @param {Record<string, string | number | EventListener>} [properties]
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function svgElement(tag, properties = {}, ...children) {
  return applyProperties(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

/**
 * Set a text only where it differs, so that selections and screen readers are not disturbed.
 * @param {Node} node
 * @param {string} text
 */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * @param {Element} made
 * @param {Record<string, string | number | EventListener>} properties
 * @param {(Node | string)[]} children
 */
function applyProperties(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}
