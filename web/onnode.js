/** What a run does, over the sampler's node and the subgraphs around it: step, time left, workers; afterwards its seconds
 * a step and speed-up. Native samplers beside a CP sampler show theirs, measured alike. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { TO_CP, allNodes, nodeOf } from "./graph.js";
import { isOpen } from "./prompts.js";
import { ending, traits } from "./runs.js";
import { digits, short, tenths } from "./seconds.js";
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
const MIN_SECONDS = 0.05; // less than that is not told of

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

/** A sampler's run, by the events that ComfyUI sends of its own samplers and of ours, on this page's clock. */
class SamplerRun {
  step = 0;
  steps = 0;
  #began = performance.now();
  #took = 0;
  #first = { step: 0, at: 0 };
  #last = 0; // when the last step was done

  /**
   * @param {string} prompt
   * @param {string} path of the node
   * @param {boolean} ours not ComfyUI's own
   */
  constructor(prompt, path, ours) {
    this.prompt = prompt;
    this.path = path;
    this.ours = ours;
    this.after = now().runs.filter(sampled).pop()?.began ?? 0; // when the workers' run before it began
  }

  /**
   * @param {number} step that is done
   * @param {number} steps
   */
  progress(step, steps) {
    this.#last = performance.now();
    if (step <= this.step || steps !== this.steps) this.#first = { step, at: this.#last };
    [this.step, this.steps] = [step, steps];
  }

  end() {
    this.#took = performance.now() - this.#began;
  }

  /**
   * "12 steps, 0.36 s each, 4.2 s for start and load": the time of a step from the end of the first to the end of the last, then
   * all else that the node took.
   * @param {...string} between
   */
  words(...between) {
    const each = (this.#last - this.#first.at) / (this.step - this.#first.step) / 1000;
    const took = this.#took / 1000;
    if (!this.steps || !Number.isFinite(each)) return joined(...between, say("line.whole", { time: tenths(took) }));
    const rest = took - each * this.steps;
    const steps = say("line.steps", { steps: this.steps, seconds: digits(each) });
    return joined(steps, ...between, rest < MIN_SECONDS ? "" : say("line.besides", { time: tenths(rest) }));
  }
}

export function startLines() {
  let prompt = ""; // that runs
  /** @type {SamplerRun | undefined} */
  let running;
  /** @type {SamplerRun | undefined} a CP sampler's that is over, but for the last news of it */
  let done;
  const runOf = (/** @type {SamplerRun | undefined} */ own) => now().runs.find((run) => own && sampled(run) && run.began > own.after);
  const sum = () => {
    const run = runOf(done);
    if (!done || !run?.end) return;
    if (done.path !== running?.path) tell(done, result(done, run));
    done = undefined;
  };
  const runs = /** @type {EventTarget} */ (api);
  const on = (/** @type {string} */ name, /** @type {(detail: any) => void} */ act) =>
    runs.addEventListener(name, (event) => act(/** @type {CustomEvent<any>} */ (event).detail));
  on("execution_start", (detail) => {
    prompt = detail.prompt_id;
  });
  on("progress", ({ value, max, prompt_id: id }) => {
    if (id === prompt) running?.progress(value, max);
  });
  for (const name of ["execution_error", "execution_interrupted"]) {
    on(name, () => {
      if (!running?.ours) running = undefined;
    });
  }
  on("executing", (detail) => {
    const path = detail == null ? "" : String(detail.node ?? detail);
    if (path === (running?.path ?? "")) return;
    running?.end();
    if (running?.ours) done = running;
    else if (running) tell(running, say("line.of", { who: say("line.alone"), what: running.words() }));
    running = isOpen(prompt) && isTimed(path) ? new SamplerRun(prompt, path, isOurs(path)) : undefined;
    sum();
    if (!running?.ours) return;
    tell(running, "");
    if (!runOf(done)) done = undefined; // it was refused before it began: the next run is not its own
  });
  follow(() => {
    if (running?.ours && inRun()) tell(running, inRun());
    sum();
  });
}

/** @param {string} path */
function isOurs(path) {
  return SAMPLERS.includes(nodeOf(path)?.comfyClass);
}

/**
 * Is it a CP sampler, or a native one in a workflow with a CP sampler?
 * @param {string} path
 */
function isTimed(path) {
  return isOurs(path) || (NATIVE.includes(nodeOf(path)?.comfyClass) && allNodes().some((node) => SAMPLERS.includes(node.comfyClass)));
}

/** @param {import("./status.js").Run} run of a sampler, and not a start that nobody asked for */
function sampled({ phases }) {
  return phases.some(([name]) => name === "loading");
}

/**
 * "4 GPUs: 20 steps, 0.12 s each, 3.4 x one worker, 2.1 s for start and load"; or where it ended.
 * @param {SamplerRun} own
 * @param {import("./status.js").Run} run
 */
function result(own, run) {
  const who = count(run.workers, run.kind === "cpu");
  const [word] = ending(run);
  const what = run.end === "idle" ? own.words(...traits(run))
    : own.step ? say("line.ended", { how: word, step: own.step, steps: own.steps }) : word;
  return say("line.of", { who, what });
}

/** "step 3 of 20, 7 s left, 0.41 s each, 2 workers": what one wants to know first, since a narrow node cuts the rest off. */
function inRun() {
  const { state, world_size, steps, step, stage } = now();
  const workers = count(world_size, now().ranks[0]?.device === "cpu");
  if (state === "starting") return joined(say(stage ? `stage.${stage}` : "state.starting"), workers);
  if (state === "loading") return joined(say("state.loading", { percent: Math.round(now().loaded * 100) }), workers);
  if (!WORKING.includes(state) || !steps) return "";
  const run = lastRun();
  const secondsLeft = left();
  return joined(
    say("line.progress", { step, steps }),
    secondsLeft === undefined ? "" : say("time.left", { time: short(secondsLeft) }),
    run?.approximate ? say("approximate") : "",
    run?.step_seconds ? say("line.each", { seconds: digits(run.step_seconds) }) : "",
    workers,
  );
}

/** @param {...string} parts */
function joined(...parts) {
  return parts.filter(Boolean).join(", ");
}

/**
 * @param {SamplerRun} run
 * @param {string} words
 */
function tell({ prompt, path }, words) {
  if (!isOpen(prompt)) return; // another workflow has a node of that number
  const steps = path.split(":");
  for (const depth of steps.keys()) {
    const node = nodeOf(steps.slice(0, depth + 1).join(":"));
    if (!node?.cpLine) continue;
    node.cpLine.text = words;
    node.setDirtyCanvas?.(true, true);
  }
  Object.assign(app.extensionManager, { [CELL]: ++revision });
}
