/** How workers share the work: first what that does, then the terms. */

import { say } from "./words.js";

/** @typedef {Record<string, number>} Degrees by the widgets' names */

/**
 * "2 GPUs, each half of the picture's tokens".
 * @param {Degrees | null} degrees 0 where the model decides
 * @param {number} workers
 * @param {boolean} cpu
 */
export function shares(degrees, workers, cpu) {
  const texts = workers === 1 ? [say("share.whole")] : clauses(degrees ?? {});
  return [count(workers, cpu), ...texts].join(", ");
}

/**
 * "2 GPUs".
 * @param {number} workers
 * @param {boolean} cpu
 */
export function count(workers, cpu) {
  if (workers === 1) return say(cpu ? "share.cpu.one" : "share.gpu.one");
  return say(cpu ? "share.cpu" : "share.gpu", { count: workers });
}

/**
 * "ring 1 x ulysses 2 x cfg 1 x data 1".
 * @param {Degrees} degrees
 */
function terms(degrees) {
  return Object.entries(degrees)
    .filter(([name, degree]) => name !== "pipeline_degree" || degree > 1)
    .map(([name, degree]) => `${name.replace("_degree", "")} ${degree || say("auto")}`)
    .join(" x ");
}

/**
 * "ring 1 x ulysses 2 x cfg 1 x data 1 = 2 workers", and on how many machines; nothing for one worker, and no degrees where all
 * are left to the model.
 * @param {Degrees} degrees
 * @param {number} workers
 * @param {number} machines
 */
export function product(degrees, workers, machines) {
  if (workers === 1) return "";
  const made = Object.values(degrees).some((degree) => degree > 1) ? say("workers", { degrees: terms(degrees), count: workers }) : "";
  return [made, machines > 1 ? say("machines", { count: machines }) : ""].filter(Boolean).join(" ");
}

/**
 * "ring 2 x cfg 2": what more than one worker has a part in.
 * @param {Degrees} degrees
 */
export function divided(degrees) {
  return terms(Object.fromEntries(Object.entries(degrees).filter(([, degree]) => degree > 1)));
}

/** @param {Degrees} degrees */
function clauses({ ring_degree: ring, ulysses_degree: ulysses, cfg_degree: cfg, data_degree: data, pipeline_degree: stages }) {
  if (!ring || !ulysses || !cfg) return [say("share.auto")];
  const parts = ring * ulysses;
  const texts = [];
  if (stages > 1) texts.push(say("share.stages", { stages }));
  if (data > 1) texts.push(say("share.images", { groups: data }));
  if (cfg > 1) texts.push(say("share.prompts"));
  if (parts === 2) texts.push(say("share.half"));
  if (parts > 2) texts.push(say("share.part", { parts }));
  return texts;
}
