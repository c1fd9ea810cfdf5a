/** What the page says, in the user's language. The words themselves are in locales/<language>/main.json. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const SPACE = "cpSampler";

/** @type {Record<string, Record<string, string>>} by language */
let words = {};

/** Fetch them once; until then, and for what has no translation, English is said. */
export async function loadWords() {
  /** @type {Record<string, any>} */
  const all = await api.getCustomNodesI18n();
  words = Object.fromEntries(Object.entries(all).map(([language, said]) => [language, said[SPACE] ?? {}]));
}

/**
 * The words for `key`, with {name} replaced by values.name.
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function say(key, values = {}) {
  const text = words[language()]?.[key] ?? words.en?.[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** @returns {string} */
function language() {
  return app.extensionManager?.setting.get("Comfy.Locale") ?? "en";
}
