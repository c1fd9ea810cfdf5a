/** What the worker group is doing, as this page last heard; who wants to know is told at once. */

import { api } from "../../scripts/api.js";

/**
 * @typedef {{model: string, resident: number, fetched: number}} Holding
 * @typedef {{keys: number, replays: number, bytes: number, eager: string[]}} Graphs
 * @typedef {{rank: number, device: string, machine: string, loaded: number, used_bytes: number | null,
 *   total_bytes: number | null, step_seconds: number | null, waited_seconds: number | null, weights: Holding[],
 *   graphs: Graphs | null}} Rank
 * @typedef {"none" | "starting" | "loading" | "sampling" | "decoding" | "encoding" | "cancelling" | "cancelled"
 *   | "idle" | "died" | "unknown"} State
 * @typedef {{state: State, text: string, reason: string, since: number, model: string, loaded: number, step: number,
 *   steps: number, world_size: number, nnodes: number, degrees: Record<string, number> | null, ranks: Rank[]}} Status
 */

export const WORKING = ["sampling", "decoding", "encoding"];
export const BUSY = ["starting", "loading", ...WORKING, "cancelling"];

/** @type {Status} */
const UNKNOWN = {
  state: "unknown", text: "", reason: "", since: 0, model: "", loaded: 0, step: 0, steps: 0, world_size: 0,
  nnodes: 0, degrees: null, ranks: [],
};

/** @type {Status} */
let status = UNKNOWN;
/** @type {Set<(now: Status, before: Status) => void>} */
const listeners = new Set();

/** @returns {Status} */
export const now = () => status;

/**
 * Call `listener` with every change from now on. Returns what ends that.
 * @param {(now: Status, before: Status) => void} listener
 */
export function follow(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Ask once, then listen: a page that was loaded in mid-run knows as much as any other. */
export async function startFollowing() {
  /** @type {EventTarget} */ (api).addEventListener("cp.status", (event) => {
    hear(/** @type {CustomEvent<Status>} */ (event).detail);
  });
  api.addEventListener("reconnected", ask);
  api.addEventListener("reconnecting", () => hear(UNKNOWN));
  await ask();
}

async function ask() {
  const answer = await api.fetchApi("/cp/status");
  hear(answer.ok ? await answer.json() : UNKNOWN);
}

/** @param {Status} news */
function hear(news) {
  const before = status;
  status = news;
  for (const listener of listeners) listener(news, before);
}
