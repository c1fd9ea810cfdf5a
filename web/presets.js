/** Named settings of a CP Parallel Config. Which one a node has is read from its values, so nothing more is saved. */

import { element, setText } from "./elements.js";
import { openHelp } from "./help.js";
import { say } from "./words.js";

/** @typedef {Record<string, string | number>} Values by the widgets' names */

/** @type {Record<string, Values>} what each sets; every other widget of OWN gets its default */
export const PRESETS = {
  auto: {},
  fast: { ring_degree: 1 },
  slow: { ulysses_degree: 1, rotate_method: "auto" },
  fastest: { compile: "on", cuda_graphs: "on" },
  memory: { weights: "offload", after_sampling: "offload" },
  machines: { nnodes: 2 },
  approximate: { step_cache: 0.06 },
};

/** What a preset sets: all that says how the work is divided, where weights are, and what is skipped. */
const OWN = [
  "ring_degree", "ulysses_degree", "rotate_method", "cfg_degree", "data_degree", "pipeline_degree", "patches", "shares", "weights",
  "after_sampling", "nnodes", "step_cache", "comm_dtype",
  "compile", "cuda_graphs",
];

/** Widgets that a user adjusts after choosing a preset: any other value than the default is still that preset. */
export const ADJUSTABLE = ["nnodes", "step_cache"];

const APPROXIMATE = ["step_cache", "patches", "comm_dtype"];

/**
 * The preset that these values are; "" if they are none.
 * @param {Values} values
 * @param {Values} defaults
 */
export function presetOf(values, defaults) {
  const has = (/** @type {string} */ name, /** @type {string | number | undefined} */ value) =>
    ADJUSTABLE.includes(name) && value !== undefined ? values[name] !== defaults[name] : values[name] === (value ?? defaults[name]);
  return Object.keys(PRESETS).find((preset) => OWN.every((name) => has(name, PRESETS[preset][name]))) ?? "";
}

/**
 * Is the result another picture than that of one GPU?
 * @param {Values} values
 * @param {Values} defaults
 */
export function isApproximate(values, defaults) {
  return APPROXIMATE.some((name) => values[name] !== defaults[name]);
}

/**
 * A choice among the presets. Values that are none are their own choice, so that each preset can be chosen again.
 * @param {(values: Values) => void} set gets the value of each widget that presets set
 * @param {Values} defaults
 */
export function presetChoice(set, defaults) {
  const options = Object.keys(PRESETS).map((name) => element("option", { value: name }, say(`preset.${name}`)));
  const custom = element("option", { value: "" }, say("preset.custom"));
  const choice = element("select.cp-choice", { onchange: () => set(valuesOf(choice.value)) }, ...options);
  const hint = element("div.cp-hint");
  const page = element("button.cp-link", { type: "button", onclick: () => void openHelp("several-machines") }, say("preset.machines"));
  const valuesOf = (/** @type {string} */ name) => Object.fromEntries(OWN.map((key) => [key, PRESETS[name][key] ?? defaults[key]]));
  return {
    element: element("label.cp-preset", {}, element("span", {}, say("preset")), choice, hint, page),
    show: (/** @type {Values} */ values) => {
      const name = presetOf(values, defaults);
      if (name) custom.remove();
      else choice.append(custom);
      choice.value = name;
      const changed = OWN.filter((key) => values[key] !== defaults[key]).map((key) => `${key} ${values[key]}`);
      const words = name ? say(`preset.${name}.hint`) : say("preset.custom.hint", { names: changed.join(", ") });
      setText(hint, words);
      page.hidden = name !== "machines";
    },
  };
}
