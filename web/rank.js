/** One worker in the panel, in one line: name, memory, seconds per step, percent waiting. Its details open by a click. */

import { element, setText } from "./elements.js";
import { digits, fixed } from "./seconds.js";
import { say, translate } from "./words.js";

/**
 * @typedef {import("./status.js").Status} Status
 * @typedef {{model: string, resident: number, fetched: number}} Holding
 * @typedef {{keys: number, replays: number, bytes: number, eager: string[]}} Graphs
 * @typedef {{rank: number, device: string, machine: string, loaded: number, blocks: [number, number] | null, used_bytes: number | null,
 *   total_bytes: number | null, step_seconds: number | null, waited_seconds: number | null, weights: Holding[],
 *   graphs: Graphs | null}} Rank
 */

const GIB = 2 ** 30;
const FULL = 0.9;

/** @returns {HTMLElement & {show: (rank: Rank, status: Status) => void}} one line; a click shows the rest */
export function rankCard() {
  const name = element("span.cp-rank");
  const fill = element("div.cp-fill");
  const bar = element("div.cp-bar", { role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  const speed = element("span.cp-speed");
  const waited = element("span.cp-waited");
  const memory = element("div.cp-memory.cp-small");
  const device = element("div.cp-device.cp-small");
  const waiting = element("div.cp-small");
  const weights = element("div.cp-weights");
  const details = element("details.cp-detail", {},
    element("summary.cp-row", {}, name, bar, speed, waited), memory, device, waiting, weights);
  const card = element("li.cp-card", {}, details);
  return Object.assign(card, {
    show: (/** @type {Rank} */ rank, /** @type {Status} */ status) => {
      card.dataset.rank = rank.rank;
      setText(name, cardName(rank));
      setText(device, [rank.device, say("rank", { rank: rank.rank }), rank.machine].filter(Boolean).join(" · "));
      card.classList.toggle("cp-lost", status.loss?.rank === rank.rank);
      showMemory(bar, fill, memory, rank);
      const loading = status.state === "loading" && rank.loaded < 1;
      setText(speed, loading ? `${Math.round(rank.loaded * 100)} %` : rank.step_seconds ? say("time.seconds", { seconds: digits(rank.step_seconds) }) : "");
      speed.title = loading || !rank.step_seconds ? "" : say("step.last", { seconds: digits(rank.step_seconds) });
      const share = waitingPercent(rank);
      const words = loading || share === undefined ? "" : say("step.waited", { percent: share });
      setText(waited, words && `${share} %`);
      waited.title = words;
      setText(waiting, words);
      showWeights(weights, rank);
    },
  });
}

/**
 * A GPU that no worker uses yet, as a line of its own.
 * @param {import("./status.js").Gpu} gpu
 */
export function gpuLine(gpu) {
  return element("li.cp-card.cp-unused", {}, element("div.cp-row", {}, ...gpuParts(gpu)));
}

/**
 * Number, name and memory of a GPU.
 * @param {import("./status.js").Gpu} gpu
 * @returns {HTMLElement[]}
 */
export function gpuParts({ index, name, total_bytes: total }) {
  const number = element("span.cp-rank", {}, cardName({ rank: index, device: `cuda:${index}` }));
  return [number, element("span.cp-name", { title: name }, name), element("span", {}, total ? `${gib(total)} GiB` : "")];
}

/**
 * What it computes on, as a person would call it.
 * @param {{rank: number, device: string}} rank
 */
export function cardName({ rank, device }) {
  const [kind, index] = device.split(":");
  return kind === "cpu" ? workerName({ rank, device }) : say("card.gpu", { index: index ?? rank });
}

/**
 * Its name in sentences on its end, "rank 1 (cpu)".
 * @param {{rank: number, device: string}} rank
 */
export function workerName({ rank, device }) {
  return translate({ code: "worker", values: { rank, device } });
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

/**
 * The percent of a step in which it waits for other GPUs; known only where ranks exchange through main memory.
 * @param {Rank} rank
 */
function waitingPercent(rank) {
  if (!rank.step_seconds || rank.waited_seconds === null) return undefined;
  return Math.round(100 * Math.min(1, rank.waited_seconds / rank.step_seconds));
}

/** @param {number} bytes */
function gib(bytes) {
  return fixed(bytes / GIB, bytes < 10 * GIB ? 2 : 1);
}
