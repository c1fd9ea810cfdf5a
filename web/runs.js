/** The last runs: what their time went into, and how much faster they were than one GPU. */

import { element } from "./elements.js";
import { digits, duration, fixed, moment, tenths } from "./seconds.js";
import { count } from "./shares.js";
import { elapsed, now } from "./status.js";
import { say, translate } from "./words.js";

/** @typedef {import("./status.js").Run} Run */

const PHASES = ["starting", "loading", "sampling", "decoding", "encoding"];
const WORK = ["loading", "sampling", "decoding", "encoding"];
const SHOWN = 5;
const MIN_SECONDS = 0.5; // seconds worth a word

/**
 * "12 steps in 2.4 s (0.20 s each), after 4 s of start-up" and how much faster than one GPU; nothing before there was a step.
 * @param {Run | undefined} run
 * @returns {string[]}
 */
export function facts(run) {
  if (!run?.step_seconds) return [];
  const before = seconds(run, ["starting", "loading"]);
  const time = tenths(seconds(run, ["sampling"]));
  const steps = say("run.steps", { steps: run.steps, time, seconds: digits(run.step_seconds) });
  const when = run.measured && run.alone && run.alone_at
    ? say("run.measured.at", { at: moment(run.alone_at), seconds: digits(run.alone) }) : "";
  return [before < MIN_SECONDS ? steps : say("run.facts", { steps, before: duration(before) }), ...traits(run), when].filter(Boolean);
}

/**
 * What else is to be said of its result: that it is approximate, and how many times as fast it was as one GPU.
 * @param {Run} run
 */
export function traits(run) {
  return [run.approximate ? say("approximate") : "", faster(run)].filter(Boolean);
}

/**
 * How much faster than one GPU, measured or estimated.
 * @param {Run} run
 */
function faster(run) {
  if (!run.alone || !run.step_seconds) return "";
  return say(run.measured ? "run.measured" : "run.estimated", { times: fixed(run.alone / run.step_seconds, 1) });
}

/** @returns {HTMLElement & {show: () => void}} the last runs, each a bar of its phases */
export function timeline() {
  const list = element("ul.cp-runs");
  const legend = element("div.cp-legend");
  const view = element("div.cp-timeline", {}, element("h3.cp-subtitle", {}, say("runs")), list, legend);
  const show = () => {
    const runs = shownRuns().map(going);
    const longest = Math.max(1e-3, ...runs.filter((run) => seconds(run, WORK) > 0).map((run) => seconds(run, PHASES)));
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

/** The last ones, newest first; of starts that nobody asked for, and of measurements, only what there is space for. */
function shownRuns() {
  const { runs } = now();
  const major = runs.filter((run) => !run.measuring && !run.comparing && seconds(run, WORK) > 0).slice(-SHOWN);
  const minor = runs.filter((run) => !major.includes(run));
  const chosen = [...major, ...minor.slice(Math.max(0, minor.length - (SHOWN - major.length)))];
  if (minor.length && runs.at(-1) === minor.at(-1) && !chosen.includes(runs[runs.length - 1])) chosen.push(runs[runs.length - 1]);
  return chosen.sort((one, other) => other.began - one.began);
}

/**
 * Two lines to compare: how it ended, model, workers; size, seconds per step, speed-up. Start-up is a part of the bar alone.
 * @param {Run} run
 * @param {number} longest
 */
function bar(run, longest) {
  const parts = run.phases.map(([phase, time]) =>
    element(`span.cp-phase.cp-phase-${phase}`, {
      style: `flex-grow: ${time}`, title: `${say(`phase.${phase}`)}: ${tenths(time)}`,
    }));
  const wide = Math.min(100, Math.max(4, (100 * seconds(run, PHASES)) / longest));
  if (run.end === "refused" && !run.phases.length) return refused(run);
  const kind = run.model || say(seconds(run, ["decoding", "encoding"]) ? "run.vae" : "phase.starting");
  const asked = run.measuring ? "run.measure" : run.comparing ? "plan.compare" : "";
  const name = asked ? `${say(asked)}: ${kind}` : kind;
  const figures = [
    count(run.workers, run.kind === "cpu"), run.approximate ? say("approximate") : "", run.tokens ? say("run.tokens", { tokens: run.tokens }) : "",
    run.step_seconds ? say("step.seconds", { seconds: digits(run.step_seconds) }) : "", faster(run), translate(run.reason),
  ].filter(Boolean).join(" · ");
  const time = tenths(seconds(run, run.step_seconds ? ["sampling"] : PHASES));
  return element(
    "li.cp-run", { title: [name, ...facts(run)].join(". "), "data-end": run.end },
    element("div.cp-line.cp-small", {}, ...mark(run), element("span.cp-name", {}, name), element("span", {}, time)),
    element("div.cp-small.cp-figures", {}, figures),
    element("div.cp-phases", { style: `width: ${wide}%` }, ...parts),
  );
}

/**
 * One that never began, with its reason.
 * @param {Run} run
 */
function refused(run) {
  return element(
    "li.cp-run", { title: translate(run.reason), "data-end": run.end },
    element("div.cp-line.cp-small", {}, ...mark(run), element("span.cp-name", {}, moment(run.began))),
    element("div.cp-small.cp-figures", {}, translate(run.reason)),
  );
}

/** @param {Run} run */
function mark(run) {
  const [word, sign] = ending(run);
  return word ? [element("span.cp-end", { title: word, "aria-label": word }, run.end === "idle" ? sign : `${sign} ${word}`)] : [];
}

/**
 * How it ended, as a word and a sign; [] while it goes on.
 * @param {Run} run
 * @returns {string[]}
 */
export function ending({ end }) {
  const ends = /** @type {Record<string, string[]>} */ ({
    idle: [say("run.ok"), "✓"], cancelled: [say("run.cancelled"), "⊘"], died: [say("run.died"), "✕"],
    unstarted: [say("run.died"), "✕"], refused: [say("run.refused"), "⊘"],
  });
  return ends[end] ?? [];
}

/**
 * @param {Run} run
 * @param {string[]} phases
 */
function seconds(run, phases) {
  return run.phases.reduce((sum, [phase, took]) => sum + (phases.includes(phase) ? took : 0), 0);
}
