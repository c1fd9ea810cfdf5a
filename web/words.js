/** What the page says, in the user's language. The words themselves are in locales/<language>/main.json. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { understood } from "./understood.js";

const SPACE = "cpSampler";
const REPORT = "cpReport"; // what CP Plan says
const REFUSALS = "cpRefusals"; // why a run was refused; English comes alone

/** @type {Record<string, Record<string, string>>} by language */
let words = {};
/** @type {Record<string, Record<string, string>>} by language */
let reports = {};
/** @type {Record<string, Record<string, string>>} by language */
let refusals = {};

/** Fetch them once; until then, and for what has no translation, English is said. */
export async function loadWords() {
  /** @type {Record<string, any>} */
  const all = await api.getCustomNodesI18n();
  const of = (/** @type {string} */ space) =>
    Object.fromEntries(Object.entries(all).map(([language, said]) => [language, said[space] ?? {}]));
  words = of(SPACE);
  reports = of(REPORT);
  refusals = of(REFUSALS);
}

/** @typedef {string | [key: string, values: Record<string, any>]} Said sentences among the values */

/**
 * A sentence of a report, or a refusal, in the user's language, or in English where it has none.
 * @param {Said} said
 * @returns {string}
 */
export function translated(said) {
  if (typeof said === "string") {
    const found = understood(said, refusals[language()] ?? {});
    return found ? filled(found[0], inWords(found[1])) : said;
  }
  const [key, values] = said;
  return filled(worded(reports, key), inWords(values));
}

/**
 * The words for `key`, with {name} replaced by values.name.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function say(key, values = {}) {
  return filled(worded(words, key), values);
}

/**
 * @param {Record<string, Record<string, string>>} all
 * @param {string} key
 */
function worded(all, key) {
  return all[language()]?.[key] ?? all.en?.[key] ?? key;
}

/**
 * Sentences among the values are translated too.
 * @param {Record<string, any>} values
 * @returns {Record<string, string | number>}
 */
function inWords(values) {
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, typeof value === "number" ? value : translated(value)]));
}

/**
 * @param {string} text
 * @param {Record<string, string | number>} values
 */
function filled(text, values) {
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** @returns {string} */
function language() {
  return app.extensionManager?.setting.get("Comfy.Locale") ?? "en";
}
