/** What the worker group is doing, as this page last received it; listeners are called at once. */

import { api } from "../../scripts/api.js";
import { say, translate } from "./words.js";

/**
 * @typedef {import("./rank.js").Rank} Rank
 * @typedef {"none" | "starting" | "unstarted" | "loading" | "sampling" | "decoding" | "encoding" | "cancelling"
 *   | "cancelled" | "idle" | "died" | "unknown"} State
 * @typedef {{rank: number | null, kind: string, words: string[], settled: boolean}} Loss
 * @typedef {{model: string, workers: number, kind: string, tokens: number, measuring: boolean, comparing: boolean, approximate: boolean, began: number, phases: [string, number][], steps: number,
 *   step_seconds: number | null, waited: number | null, alone: number | null, measured: boolean, alone_at: number | null, end: string,
 *   reason: import("./words.js").Sentence}} Run
 * @typedef {{state: State, text: string, reason: string, sentence: import("./words.js").Sentence, since: number, elapsed: number, stage: string,
 *   loss: Loss | null, help: string, model: string, loaded: number, step: number, steps: number, world_size: number,
 *   nnodes: number, degrees: Record<string, number> | null, ranks: Rank[], runs: Run[]}} Status
 */

export const WORKING = ["sampling", "decoding", "encoding"];
export const FAILED = ["died", "unstarted"];
export const BUSY = ["starting", "loading", ...WORKING, "cancelling"];

/** @type {Status} */
const UNKNOWN = {
  state: "unknown", text: "", reason: "", sentence: "", since: 0, elapsed: 0, stage: "", loss: null, help: "", model: "", loaded: 0,
  step: 0, steps: 0, world_size: 0, nnodes: 0, degrees: null, ranks: [], runs: [],
};

/** @type {Status} */
let status = UNKNOWN;
let receivedAt = 0; // on this browser's clock, which may be another than the server's
let visible = 0; // GPUs that ComfyUI uses
/** @type {import("./words.js").Sentence} */
let newer = "";
/** @type {Gpu[]} */
let listed = [];
/** @type {Set<(now: Status, before: Status) => void>} */
const listeners = new Set();

/** @returns {Status} */
export const now = () => status;

/** GPUs that ComfyUI uses on its machine. */
export const gpus = () => visible;

/** @typedef {{index: number, name: string, total_bytes: number | null}} Gpu */

/** The same GPUs, each with its name and memory. @returns {Gpu[]} */
export const gpuList = () => listed;

/** That this ComfyUI is newer than the tests' ("" where it is not), in the user's language. */
export const untested = () => translate(newer);

/** Seconds since the state last changed. */
export const elapsed = () => status.elapsed + (performance.now() - receivedAt) / 1000;

/** @returns {Run | undefined} the run that goes on, or else the last one */
export const lastRun = () => status.runs.filter((run) => run.phases.length || run.end !== "refused").pop();

/**
 * What the rank that was lost printed last, or that it printed nothing.
 * @param {Status} of
 */
export function lastWords({ loss, step, steps }) {
  if (!loss?.settled || loss.rank === null || loss.words.length) return loss?.words ?? [];
  return steps ? [say("loss.silent", { step, steps })] : [];
}

/**
 * Why the workers are gone, in the user's language.
 * @param {Status} of
 */
export const reasonOf = ({ sentence }) => translate(sentence);

/** Seconds until the last step is done; undefined where it is unknown. */
export function left() {
  const pace = lastRun()?.step_seconds;
  if (status.state !== "sampling" || !pace || !status.steps) return undefined;
  return Math.max(0, (status.steps - status.step) * pace);
}

/**
 * Call `listener` with every change from now on. Returns a function that ends it.
 * @param {(now: Status, before: Status) => void} listener
 */
export function follow(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Ask once, then listen: a page that was loaded in mid-run knows as much as any other. */
export async function startFollowing() {
  /** @type {EventTarget} */ (api).addEventListener("cp.status", (event) => {
    receive(/** @type {CustomEvent<Status>} */ (event).detail);
  });
  api.addEventListener("reconnected", ask);
  api.addEventListener("reconnecting", () => receive(UNKNOWN));
  await ask();
}

async function ask() {
  const answer = await api.fetchApi("/cp/status");
  const news = answer.ok ? await answer.json() : UNKNOWN;
  visible = news.gpus ?? visible;
  listed = news.gpu_list ?? listed;
  newer = news.untested ?? newer;
  receive(news);
}

/** @param {Status} news */
function receive(news) {
  const before = status;
  status = news;
  receivedAt = performance.now();
  for (const listener of listeners) listener(news, before);
}
