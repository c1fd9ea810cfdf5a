/** What a run does, over the sampler's node and the subgraphs around it: workers, step, time left; afterwards its
 * seconds and speed-up. Native samplers beside a CP sampler show their seconds, to compare. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { TO_CP, allNodes, nodeOf } from "./graph.js";
import { result, took } from "./runs.js";
import { digits, duration } from "./seconds.js";
import { count } from "./shares.js";
import { WORKING, follow, lastRun, left, now } from "./status.js";
import { say } from "./words.js";

const SAMPLERS = Object.values(TO_CP);
const NATIVE = Object.keys(TO_CP);
const CELL = "cpSamplerLines"; // on ComfyUI's own reactive store: Nodes 2.0 draws again what read it when it changes
const PADDING = 6;
const HIGH = 20;
const GAP = 2;
const FONT = "12px Inter, sans-serif";

/** @typedef {import("./graph.js").LGraphNode} LGraphNode */

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

/**
 * Gives a new node its line if it may ever say something: Nodes 2.0 asks for a node's badges once, when it draws it first.
 * @param {LGraphNode} node
 */
export function addLine(node) {
  if (![...SAMPLERS, ...NATIVE].includes(node.comfyClass) && !node.isSubgraphNode?.()) return;
  const line = new Line(node);
  node.cpLine = line;
  node.badges.push(() => {
    void /** @type {any} */ (app.extensionManager)[CELL];
    return line;
  });
}

export function startLines() {
  let running = ""; // the path of the CP sampler that runs, "" if none does
  let after = 0; // when the run before its own began
  /** @type {{path: string, after: number} | undefined} its run is over, but for the last news of it */
  let done;
  const sum = () => {
    const run = now().runs.find((one) => done && sampled(one) && one.began > done.after);
    if (!done || !run?.end) return;
    if (done.path !== running) tell(done.path, result(run));
    done = undefined;
  };
  const native = nativeTimes();
  /** @type {EventTarget} */ (api).addEventListener("executing", (event) => {
    const id = /** @type {CustomEvent<any>} */ (event).detail;
    const path = id == null ? "" : String(id?.node ?? id);
    native(path);
    if (running === path) return;
    if (running) done = { path: running, after };
    running = SAMPLERS.includes(nodeOf(path)?.comfyClass) ? path : "";
    sum();
    after = now().runs.filter(sampled).pop()?.began ?? 0;
    if (running) tell(running, "");
  });
  follow(() => {
    if (running && inRun()) tell(running, inRun());
    sum();
  });
}

/**
 * Says how long a native sampler took, where the workflow has a CP sampler too.
 * @returns {(path: string) => void} to be called with each node that begins
 */
function nativeTimes() {
  let timed = "";
  let began = 0;
  return (path) => {
    if (path === timed) return;
    if (timed) tell(timed, say("line.native", { time: took((performance.now() - began) / 1000) }));
    timed = NATIVE.includes(nodeOf(path)?.comfyClass) && allNodes().some((node) => SAMPLERS.includes(node.comfyClass)) ? path : "";
    began = performance.now();
  };
}

/** @param {import("./status.js").Run} run of a sampler, and not a start that nobody asked for */
function sampled({ phases }) {
  return phases.some(([name]) => name === "loading");
}

/** "2 workers, step 3 of 20, 0.41 s each, 7 s left" */
function inRun() {
  const { state, world_size, steps, step, stage } = now();
  const workers = count(world_size, now().ranks[0]?.device === "cpu");
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
 * @param {string} path of the sampler
 * @param {string} words
 */
function tell(path, words) {
  const steps = path.split(":");
  for (const depth of steps.keys()) {
    const node = nodeOf(steps.slice(0, depth + 1).join(":"));
    if (!node?.cpLine) continue;
    node.cpLine.text = words;
    node.setDirtyCanvas?.(true, true);
  }
  Object.assign(app.extensionManager, { [CELL]: ++revision });
}
