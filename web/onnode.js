/** What a run does, on the sampler's own node: workers, step, seconds a step, time left; afterwards how long it took. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { facts } from "./runs.js";
import { digits, duration } from "./seconds.js";
import { count } from "./shares.js";
import { WORKING, follow, lastRun, left, now } from "./status.js";
import { say } from "./words.js";

const SAMPLERS = ["CPSampler", "CPSamplerAdvanced", "CPSamplerCustom"];
const PADDING = 6;
const HIGH = 20;
const FONT = "12px Inter, sans-serif";

/** @typedef {any} LGraphNode */

/** What both renderers take for a badge: LiteGraph draws it, Nodes 2.0 reads its text and colours. */
class Line {
  visible = true;
  height = HIGH;
  fgColor = "#e6edf7";
  bgColor = "#1d4477";
  boundingRect = [0, 0, 0, 0];

  /** @param {string} text */
  constructor(text) {
    this.text = text;
  }

  /** @param {CanvasRenderingContext2D} canvas */
  getWidth(canvas) {
    canvas.save();
    canvas.font = FONT;
    const wide = canvas.measureText(this.text).width + 2 * PADDING;
    canvas.restore();
    return wide;
  }

  /**
   * @param {CanvasRenderingContext2D} canvas
   * @param {number} x
   * @param {number} y
   */
  draw(canvas, x, y) {
    const wide = this.getWidth(canvas);
    canvas.save();
    canvas.font = FONT;
    canvas.fillStyle = this.bgColor;
    canvas.beginPath();
    canvas.roundRect(x, y, wide, HIGH, 5);
    canvas.fill();
    canvas.fillStyle = this.fgColor;
    canvas.textBaseline = "middle";
    canvas.textAlign = "left";
    canvas.fillText(this.text, x + PADDING, y + HIGH / 2 + 1);
    canvas.restore();
  }
}

export function startLines() {
  /** @type {LGraphNode | undefined} */
  let running;
  let after = 0; // when the run before its own began
  /** @type {{node: LGraphNode, after: number} | undefined} its run is over, but for the last news of it */
  let done;
  const sum = () => {
    const run = now().runs.find((one) => done && sampled(one) && one.began > done.after);
    if (!done || !run?.end) return;
    if (done.node !== running) tell(done.node, facts(run).join(". "));
    done = undefined;
  };
  /** @type {EventTarget} */ (api).addEventListener("executing", (event) => {
    const id = /** @type {CustomEvent<any>} */ (event).detail;
    const node = id == null ? undefined : nodeOf(String(id?.node ?? id));
    if (running === node) return;
    if (running) done = { node: running, after };
    running = SAMPLERS.includes(node?.comfyClass) ? node : undefined;
    sum();
    after = now().runs.filter(sampled).pop()?.began ?? 0;
    if (running) tell(running, "");
  });
  follow(() => {
    if (running && inRun()) tell(running, inRun());
    sum();
  });
}

/** @param {import("./status.js").Run} run of a sampler, and not a start that nobody asked for */
function sampled({ phases }) {
  return phases.some(([name]) => name === "loading");
}

/**
 * Ids of nodes in subgraphs are paths, such as 12:3.
 * @param {string} id
 * @returns {LGraphNode | undefined}
 */
export function nodeOf(id) {
  /** @type {any} */
  let graph = app.rootGraph ?? app.graph;
  const steps = id.split(":");
  for (const step of steps.slice(0, -1)) graph = graph?.getNodeById(step)?.subgraph;
  return graph?.getNodeById(steps[steps.length - 1]) ?? undefined;
}

/** "2 GPUs · 3 / 20 · 0.41 s · 7 s left" */
function inRun() {
  const { state, world_size, steps, step, ranks, stage } = now();
  const workers = count(world_size, ranks[0]?.device === "cpu");
  if (state === "starting") return [workers, say(stage ? `stage.${stage}` : "state.starting")].join(" · ");
  if (state === "loading") return [workers, say("state.loading", { percent: Math.round(now().loaded * 100) })].join(" · ");
  if (!WORKING.includes(state) || !steps) return "";
  const pace = lastRun()?.step_seconds;
  const rest = left();
  return [
    workers, say("state.step", { step, steps }),
    pace ? say("step.seconds", { seconds: digits(pace) }) : "",
    rest === undefined ? "" : say("time.left", { time: duration(rest) }),
  ].filter(Boolean).join(" · ");
}

/**
 * @param {LGraphNode} node
 * @param {string} words
 */
function tell(node, words) {
  const others = (node.badges ?? []).filter((/** @type {any} */ one) => !one.ofRun);
  const line = new Line(words);
  node.badges = words ? [...others, Object.assign(() => line, { ofRun: true })] : others;
  node.setDirtyCanvas?.(true, true);
}
