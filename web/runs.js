/** The last runs: what their time went into, and how much faster they were than one worker. */

import { element } from "./elements.js";
import { digits, duration } from "./seconds.js";
import { elapsed, now } from "./status.js";
import { say } from "./words.js";

/** @typedef {import("./status.js").Run} Run */

const PHASES = ["starting", "loading", "sampling", "decoding", "encoding"];
const SHOWN = 5;
const MIN_SECONDS = 0.5; // seconds worth a word

/**
 * "20 steps, 0.41 s each + 4 s start and load" and how much faster than one worker; nothing before there was a step.
 * @param {Run | undefined} run
 * @returns {string[]}
 */
export function facts(run) {
  if (!run?.step_seconds) return [];
  const before = seconds(run, ["starting", "loading"]);
  const steps = pace(run);
  return [before < MIN_SECONDS ? steps : say("run.facts", { steps, before: duration(before) }), faster(run)].filter(Boolean);
}

/**
 * "20 steps, 0.41 s each"; nothing before there was a step.
 * @param {Run | undefined} run
 */
export function pace(run) {
  return run?.step_seconds ? say("run.steps", { steps: run.steps, seconds: digits(run.step_seconds) }) : "";
}

/**
 * How much faster than one worker, measured or estimated.
 * @param {Run} run
 */
function faster(run) {
  if (!run.alone || !run.step_seconds) return "";
  const times = (run.alone / run.step_seconds).toFixed(1);
  return say(run.measured ? "run.measured" : "run.estimated", { times, seconds: digits(run.alone) });
}

/** @returns {HTMLElement & {show: () => void}} the last runs, each a bar of its phases */
export function timeline() {
  const list = element("ul.cp-runs");
  const legend = element("div.cp-legend");
  const view = element("div.cp-timeline", {}, element("h3.cp-subtitle", {}, say("runs")), list, legend);
  const show = () => {
    const runs = now().runs.slice(-SHOWN).reverse().map(going);
    const longest = Math.max(1e-3, ...runs.map((run) => seconds(run, PHASES)));
    list.replaceChildren(...runs.map((run) => bar(run, longest)));
    const used = PHASES.filter((phase) => runs.some((run) => seconds(run, [phase]) > 0));
    legend.replaceChildren(...used.map((phase) =>
      element("span.cp-key", {}, element(`span.cp-swatch.cp-phase-${phase}`), say(`phase.${phase}`))));
    view.hidden = !runs.length;
  };
  return Object.assign(view, { show });
}

/**
 * With the phase that is not over.
 * @param {Run} run
 * @param {number} index from the newest
 * @returns {Run}
 */
function going(run, index) {
  const { state } = now();
  return index === 0 && PHASES.includes(state) ? { ...run, phases: [...run.phases, [state, elapsed()]] } : run;
}

/**
 * @param {Run} run
 * @param {number} longest
 */
function bar(run, longest) {
  const parts = run.phases.map(([phase, took]) =>
    element(`span.cp-phase.cp-phase-${phase}`, {
      style: `flex-grow: ${took}`, title: `${say(`phase.${phase}`)}: ${duration(took)}`,
    }));
  const total = seconds(run, PHASES);
  const wide = Math.max(4, (100 * total) / longest);
  const name = run.model || say(seconds(run, ["decoding", "encoding"]) ? "run.vae" : "phase.starting");
  return element(
    "li.cp-run", { title: [name, ...facts(run)].join(". ") },
    element("div.cp-line.cp-small", {}, element("span.cp-name", {}, name), element("span", {}, duration(total))),
    element("div.cp-phases", { style: `width: ${wide}%` }, ...parts),
  );
}

/**
 * @param {Run} run
 * @param {string[]} phases
 */
function seconds(run, phases) {
  return run.phases.reduce((sum, [phase, took]) => sum + (phases.includes(phase) ? took : 0), 0);
}
