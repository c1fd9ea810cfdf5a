/** What a run does, on the sampler's own node: workers, step, seconds a step, time left; afterwards steps and seconds. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { pace } from "./runs.js";
import { digits, duration } from "./seconds.js";
import { WORKING, follow, lastRun, left, now } from "./status.js";
import { say } from "./words.js";

export const SAMPLERS = ["CPSampler", "CPSamplerAdvanced", "CPSamplerCustom", "CPSamplerCustomBasic"];
const CELL = "cpSamplerLines"; // on ComfyUI's own reactive store: Nodes 2.0 draws again what read it when it changes
const PADDING = 6;
const HIGH = 20;
const GAP = 2;
const FONT = "12px Inter, sans-serif";

/** @typedef {any} LGraphNode */

let revision = 0;

/** What both renderers take for a badge: LiteGraph draws it, Nodes 2.0 reads its text and colours. No wider than the node. */
class Line {
  text = "";
  visible = true;
  height = HIGH;
  fgColor = "#e6edf7";
  bgColor = "#1d4477";
  cssIcon = "cp-of-run"; // by which style.css finds it
  boundingRect = [0, 0, 0, 0];
  #node;

  /** @param {LGraphNode} node */
  constructor(node) {
    this.#node = node;
  }

  /** None: it has a row of its own, above the page's badges. */
  getWidth() {
    return 0;
  }

  /**
   * @param {CanvasRenderingContext2D} canvas
   * @param {number} _
   * @param {number} y where the page's badges are
   */
  draw(canvas, _, y) {
    if (!this.text) return;
    const room = this.#node.size[0];
    canvas.save();
    canvas.font = FONT;
    const wide = Math.min(canvas.measureText(this.text).width + 2 * PADDING, room);
    const [left, top] = [room - wide, y - HIGH - GAP];
    canvas.fillStyle = this.bgColor;
    canvas.beginPath();
    canvas.roundRect(left, top, wide, HIGH, 5);
    canvas.fill();
    canvas.fillStyle = this.fgColor;
    canvas.textBaseline = "middle";
    canvas.textAlign = "left";
    canvas.fillText(this.text, left + PADDING, top + HIGH / 2 + 1, wide - 2 * PADDING);
    canvas.restore();
  }
}

/** @param {LGraphNode} node a new sampler */
export function addLine(node) {
  const line = new Line(node);
  node.cpLine = line;
  node.badges.push(() => {
    void /** @type {any} */ (app.extensionManager)[CELL];
    return line;
  });
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
    if (done.node !== running) tell(done.node, pace(run));
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

/** "2 workers, step 3 of 20, 0.41 s each, 7 s left" */
function inRun() {
  const { state, world_size, steps, step, stage } = now();
  const workers = say(world_size === 1 ? "line.worker" : "line.workers", { count: world_size });
  if (state === "starting") return joined(workers, say(stage ? `stage.${stage}` : "state.starting"));
  if (state === "loading") return joined(workers, say("state.loading", { percent: Math.round(now().loaded * 100) }));
  if (!WORKING.includes(state) || !steps) return "";
  const seconds = lastRun()?.step_seconds;
  const secondsLeft = left();
  return joined(
    workers,
    say("line.step", { step, steps }),
    seconds ? say("line.each", { seconds: digits(seconds) }) : "",
    secondsLeft === undefined ? "" : say("time.left", { time: duration(secondsLeft) }),
  );
}

/** @param {...string} parts */
function joined(...parts) {
  return parts.filter(Boolean).join(", ");
}

/**
 * @param {LGraphNode} node
 * @param {string} words
 */
function tell(node, words) {
  node.cpLine.text = words;
  Object.assign(app.extensionManager, { [CELL]: ++revision });
  node.setDirtyCanvas?.(true, true);
}
