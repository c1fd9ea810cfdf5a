/** The nearest setting that works, as a button that sets it in a CP Parallel Config. */

import { app } from "../../scripts/app.js";
import { element } from "./elements.js";
import { gpus } from "./status.js";
import { say } from "./words.js";

export const REMEDIED = "cp.remedied";

/** @typedef {{name: string, value: unknown, automatic: boolean}} Change a widget, what to set it to, and whether the choice is auto's then */

/**
 * Nothing where there is nothing to change.
 * @param {any} config
 * @param {Change[]} changes
 * @param {(setting: string) => void} done is told in words what was set
 * @returns {HTMLElement[]}
 */
export function remedy(config, changes, done) {
  if (!config || !changes.length) return [];
  const setting = changes.map(inWords).join(", ");
  const use = element("button.cp-button", { type: "button" }, say("plan.use", { setting }));
  use.addEventListener("click", () => {
    setValues(config, Object.fromEntries(changes.map(({ name, value }) => [name, value])));
    document.dispatchEvent(new Event(REMEDIED));
    done(setting);
  });
  return [use];
}

/** @param {Change} change */
function inWords({ name, value, automatic }) {
  if (name === "devices" && automatic && gpus()) return say("plan.every");
  return `${name} ${automatic ? say("auto") : value}`;
}

/**
 * @param {any} config
 * @param {Record<string, unknown>} values by the widgets' names
 */
export function setValues(config, values) {
  for (const [name, value] of Object.entries(values)) {
    const widget = config.widgets.find((/** @type {any} */ one) => one.name === name);
    if (!widget || widget.value === value) continue;
    widget.value = value;
    widget.callback?.(value, app.canvas, config);
  }
  app.graph.setDirtyCanvas(true, true);
}
