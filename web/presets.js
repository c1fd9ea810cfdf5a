/** Named settings of a CP Parallel Config. Which one a node has is read from its values, so nothing more is saved. */

import { element, setText } from "./elements.js";
import { say } from "./words.js";

/** @typedef {Record<string, string | number>} Values by the widgets' names */

/** @type {Record<string, Values>} what each sets; every other widget that a preset sets gets its default */
export const PRESETS = {
  auto: {},
  fast: { ring_degree: 1 },
  slow: { ulysses_degree: 1, rotate_method: "auto" },
  memory: { weights: "offload", after_sampling: "offload" },
  machines: { nnodes: 2 },
  approximate: { step_cache: 0.06 },
};

/** Widgets that a user adjusts after choosing a preset: any other value than the default is still that preset. */
export const ADJUSTABLE = ["nnodes", "step_cache"];

/**
 * The preset that sets the most of these values; auto sets none, so it always fits.
 * @param {Values} values
 * @param {Values} defaults
 */
export function presetOf(values, defaults) {
  const has = (/** @type {string} */ name, /** @type {string | number} */ value) =>
    ADJUSTABLE.includes(name) ? values[name] !== defaults[name] : values[name] === value;
  const fits = (/** @type {Values} */ preset) => Object.entries(preset).every(([name, value]) => has(name, value));
  return Object.keys(PRESETS).filter((name) => fits(PRESETS[name])).sort((one, other) => size(one) - size(other)).pop() ?? "auto";
}

/** @param {string} name */
const size = (name) => Object.keys(PRESETS[name]).length;

/**
 * A choice among the presets.
 * @param {(values: Values) => void} set gets the value of each widget that some preset sets
 * @param {Values} defaults
 */
export function presetChoice(set, defaults) {
  const options = Object.keys(PRESETS).map((name) => element("option", { value: name }, say(`preset.${name}`)));
  const choice = element("select.cp-choice", { onchange: () => set(valuesOf(choice.value)) }, ...options);
  const hint = element("div.cp-hint");
  const valuesOf = (/** @type {string} */ name) =>
    Object.fromEntries(Object.values(PRESETS).flatMap(Object.keys).map((key) => [key, PRESETS[name][key] ?? defaults[key]]));
  return {
    element: element("label.cp-preset", {}, element("span", {}, say("preset")), choice, hint),
    show: (/** @type {string} */ name) => {
      choice.value = name;
      setText(hint, say(`preset.${name}.hint`));
    },
  };
}
