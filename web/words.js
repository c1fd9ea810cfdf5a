/** What the page says, in the user's language. The words themselves are in locales/<language>/main.json. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const SPACE = "cpSampler";
const SENTENCES = ["cpReport", "cpRefusals", "cpDeaths", "cpDeveloper"]; // what comes from ComfyUI by its code

/** @type {Record<string, Record<string, string>>} by language */
let words = {};
/** @type {Record<string, Record<string, string>>} by language */
let sentences = {};

/** Fetch them once; until then, and for what has no translation, English is said. */
export async function loadWords() {
  /** @type {Record<string, any>} */
  const all = await api.getCustomNodesI18n();
  const of = (/** @type {string[]} */ ...spaces) =>
    Object.fromEntries(
      Object.entries(all).map(([language, one]) => [language, Object.assign({}, ...spaces.map((space) => one[space]))]),
    );
  words = of(SPACE);
  sentences = of(...SENTENCES);
}

/**
 * What comes from ComfyUI: a sentence by its code, whose values may be sentences too; a list; or plain text.
 * @typedef {any[] | string | number | boolean | {code: string, values: Record<string, any>}} Sentence
 */

/**
 * In the user's language, or in English where it has none.
 * @param {Sentence} sentence
 * @returns {string}
 */
export function translate(sentence) {
  if (Array.isArray(sentence)) return sentence.map(translate).join(", ");
  if (sentence === null || typeof sentence !== "object") return String(sentence);
  const values = Object.entries(sentence.values).map(([name, value]) => [name, translate(value)]);
  return fillIn(lookUp(sentences, sentence.code), Object.fromEntries(values));
}

/**
 * The words for `key`, with {name} replaced by values.name.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function say(key, values = {}) {
  return fillIn(lookUp(words, key), values);
}

/**
 * @param {Record<string, Record<string, string>>} all
 * @param {string} key
 */
function lookUp(all, key) {
  return all[language()]?.[key] ?? all.en?.[key] ?? key;
}

/**
 * @param {string} text
 * @param {Record<string, string | number>} values
 */
function fillIn(text, values) {
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** @returns {string} */
export function language() {
  return app.extensionManager?.setting.get("Comfy.Locale") ?? "en";
}
