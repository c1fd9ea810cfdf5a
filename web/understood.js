/** Refusals come as English text. In the user's language they are said by their pattern: `cpRefusals` has each sentence
 * with its {gaps}, and what stands for it. What no pattern fits stays English. */

/** @typedef {{form: RegExp, names: string[], text: string, literal: number}} Pattern */

/** @type {WeakMap<Record<string, string>, Pattern[]>} */
const known = new WeakMap();

/**
 * @param {string} english
 * @param {Record<string, string>} sentences by their English
 * @returns {[text: string, values: Record<string, string>] | null} the other language's, and what is in its gaps
 */
export function understood(english, sentences) {
  const dot = english.endsWith(".") ? "." : "";
  const plain = english.slice(0, english.length - dot.length);
  for (const { form, names, text } of patterns(sentences)) {
    const found = form.exec(plain);
    if (found) return [text + dot, Object.fromEntries(names.map((name, index) => [name, found[index + 1]]))];
  }
  return null;
}

/**
 * Those that say most by themselves first.
 * @param {Record<string, string>} sentences
 */
function patterns(sentences) {
  const made = known.get(sentences) ?? Object.entries(sentences).map(pattern).sort((one, other) => other.literal - one.literal);
  known.set(sentences, made);
  return made;
}

/**
 * @param {[string, string]} sentence
 * @returns {Pattern}
 */
function pattern([english, text]) {
  const parts = english.split(/\{(\w+)\}/);
  const names = parts.filter((_, index) => index % 2);
  const form = parts.map((part, index) => (index % 2 ? "(.*?)" : literal(part))).join("");
  const said = parts.filter((_, index) => !(index % 2)).join("").length;
  return { form: new RegExp(`^${form}$`, "s"), names, text, literal: said };
}

/** @param {string} text */
export function literal(text) {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}
