/** One worker in the panel: device, memory, weights, speed. */

import { element, setText } from "./elements.js";
import { digits } from "./seconds.js";
import { say } from "./words.js";

/** @typedef {import("./status.js").Rank} Rank @typedef {import("./status.js").Status} Status */

const GIB = 2 ** 30;
const FULL = 0.9;

/** @returns {HTMLElement & {show: (rank: Rank, status: Status) => void}} */
export function rankCard() {
  const name = element("span.cp-rank");
  const device = element("span.cp-device");
  const fill = element("div.cp-fill");
  const bar = element("div.cp-bar", { role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  const memory = element("span.cp-memory");
  const speed = element("span.cp-speed");
  const waiting = element("div.cp-fill.cp-waiting");
  const waits = element("div.cp-bar.cp-thin", { role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, waiting);
  const waited = element("div.cp-small.cp-waited");
  const weights = element("div.cp-weights");
  const card = element(
    "li.cp-card",
    {},
    element("div.cp-line", {}, name, device),
    bar,
    element("div.cp-line.cp-small", {}, memory, speed),
    waits,
    waited,
    weights,
  );
  return Object.assign(card, {
    show: (/** @type {Rank} */ rank, /** @type {Status} */ status) => {
      card.dataset.rank = rank.rank;
      setText(name, cardName(rank));
      setText(device, [say("rank", { rank: rank.rank }), rank.machine].filter(Boolean).join(" · "));
      card.classList.toggle("cp-lost", status.loss?.rank === rank.rank);
      device.title = device.textContent;
      showMemory(bar, fill, memory, rank);
      const loading = status.state === "loading" && rank.loaded < 1;
      const shown = loading ? say("state.loading", { percent: Math.round(rank.loaded * 100) }) : seconds(rank);
      setText(speed, shown);
      setText(waited, loading ? "" : communication(rank));
      waited.hidden = waits.hidden = !waited.textContent;
      const share = Math.round(100 * Math.min(1, (rank.waited_seconds ?? 0) / (rank.step_seconds || 1)));
      waiting.style.width = `${share}%`;
      waits.setAttribute("aria-valuenow", String(share));
      waits.setAttribute("aria-label", waited.textContent ?? "");
      showWeights(weights, rank);
    },
  });
}

/**
 * What it computes on, as a person would call it.
 * @param {{rank: number, device: string}} rank
 */
export function cardName({ rank, device }) {
  const [kind, index] = device.split(":");
  return kind === "cpu" ? say("card.cpu", { number: rank + 1 }) : say("card.gpu", { index: index ?? rank });
}

/**
 * @param {HTMLElement} bar
 * @param {HTMLElement} fill
 * @param {HTMLElement} text
 * @param {Rank} rank
 */
function showMemory(bar, fill, text, rank) {
  const share = rank.used_bytes !== null && rank.total_bytes ? rank.used_bytes / rank.total_bytes : 0;
  fill.style.width = `${Math.round(share * 1000) / 10}%`;
  fill.classList.toggle("cp-full", share > FULL);
  const known = rank.used_bytes !== null && rank.total_bytes !== null;
  const words = known
    ? say("memory", { used: gib(rank.used_bytes ?? 0), total: gib(rank.total_bytes ?? 0) })
    : say("memory.none");
  setText(text, words);
  bar.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  bar.setAttribute("aria-valuetext", words);
}

/**
 * @param {HTMLElement} place
 * @param {Rank} rank
 */
function showWeights(place, rank) {
  const lines = rank.weights.map((model) => [
    model.model, say(model.fetched ? "holds.fetched" : "holds", { resident: gib(model.resident), fetched: gib(model.fetched) }),
  ]);
  if (rank.blocks) lines.push([say("holds.blocks", { first: rank.blocks[0], last: rank.blocks[1] }), ""]);
  if (rank.graphs?.keys) lines.push(["CUDA graphs", say("holds.recorded", { keys: rank.graphs.keys, size: gib(rank.graphs.bytes) })]);
  if (!lines.length && rank.used_bytes !== null) lines.push([say("holds.none"), ""]);
  while (place.children.length > lines.length) place.lastElementChild?.remove();
  while (place.children.length < lines.length) {
    place.append(element("div.cp-small.cp-holding", {}, element("span.cp-name"), element("span.cp-held")));
  }
  lines.forEach(([model, text], index) => {
    const line = /** @type {HTMLElement} */ (place.children[index]);
    setText(line.children[0], model);
    setText(line.children[1], text);
    line.title = [model, text].filter(Boolean).join(": ");
  });
}

/** @param {Rank} rank */
function seconds(rank) {
  return rank.step_seconds ? say("step.last", { seconds: digits(rank.step_seconds) }) : "";
}

/**
 * Time in communication; known only where ranks exchange through main memory, not for GPUs.
 * @param {Rank} rank
 */
function communication(rank) {
  const known = rank.step_seconds && rank.waited_seconds !== null;
  return known ? say("step.waited", { seconds: digits(rank.waited_seconds ?? 0) }) : "";
}

/** @param {number} bytes */
function gib(bytes) {
  return (bytes / GIB).toFixed(bytes < 10 * GIB ? 2 : 1);
}
