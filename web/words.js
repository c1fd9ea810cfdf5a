/** What the page says, in the user's language. The words themselves are in locales/<language>/main.json. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const SPACE = "cpSampler";
const REPORT = "cpReport"; // what CP Plan says; English comes with it

/** @type {Record<string, Record<string, string>>} by language */
let words = {};
/** @type {Record<string, Record<string, string>>} by language */
let reports = {};

/** Fetch them once; until then, and for what has no translation, English is said. */
export async function loadWords() {
  /** @type {Record<string, any>} */
  const all = await api.getCustomNodesI18n();
  const of = (/** @type {string} */ space) =>
    Object.fromEntries(Object.entries(all).map(([language, said]) => [language, said[space] ?? {}]));
  words = of(SPACE);
  reports = of(REPORT);
}

/** @typedef {string | [key: string, values: Record<string, string | number>, english: string]} Said */

/**
 * A sentence of a report in the user's language, or in English where it has none.
 * @param {Said} said
 */
export function translated(said) {
  if (typeof said === "string") return said;
  const [key, values, english] = said;
  const text = reports[language()]?.[key];
  return text ? filled(text, values) : english;
}

/**
 * The words for `key`, with {name} replaced by values.name.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function say(key, values = {}) {
  const text = words[language()]?.[key] ?? words.en?.[key] ?? key;
  return filled(text, values);
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
