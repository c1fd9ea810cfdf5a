/** CP Plan's report on its node: what is refused first, then a picture of which worker holds which part, and a table. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { svgElement, element, setText } from "./elements.js";
import { valuesOf } from "./fold.js";
import { after, configAbove } from "./graph.js";
import { lastPrompt } from "./prompts.js";
import { remedy } from "./remedy.js";
import { digits, duration, fixed } from "./seconds.js";
import { count, divided, shares } from "./shares.js";
import { addElementWidget } from "./widgets.js";
import { say, translate } from "./words.js";

export const PLAN = "CPPlan";
const ENDS = ["execution_success", "execution_error", "execution_interrupted"];
const LOOK_MILLISECONDS = 500;
const MIN_HEIGHT = 150; // pixels
const MAX_HEIGHT = 620;
const FRAME = 40; // around the report
const SHOWN = 16; // workers; more would be too thin to read
const WIDE = 360;
const LABEL = 96;
const ROW = 18;
const GAP = 4;

/**
 * @typedef {{rank: number, device: string, lane: import("./words.js").Sentence, tokens: [number, number], heads: [number, number],
 *   weights: [number, number]}} Part shares from 0 to 1
 * @typedef {import("./words.js").Sentence[]} Sentences
 * @typedef {{troubles: Sentences[], rows: [string, Sentences][], notes: Sentences[], parts: Part[],
 *   fix: import("./remedy.js").Change[], times: Time[], cost: Cost, split: Split | null}} Plan
 * @typedef {{workers: number, cpu: boolean, degrees: Record<string, number>}} Split
 * @typedef {Split & {seconds: number, times: number | null}} Time
 * @typedef {{steps: number, workers: number[], cpu: boolean, seconds: number | null}} Cost of measuring; seconds where they are known
 */

/** @type {Map<string, {plan: Plan, planned: string}>} the last plan of each node, with the settings that it is of */
const plans = new Map();

/** @param {any} node a new CP Plan */
export function addPlan(node) {
  const report = element("div.cp-report", {}, element("p.cp-hint", {}, say("plan.empty")));
  const take = runButton(node, "measure", say("plan.measure"), say("plan.measuring"));
  const compare = runButton(node, "compare", say("plan.compare"), say("plan.comparing"));
  const cost = element("p.cp-hint.cp-cost", {}, say("plan.measure.tip"));
  const hint = element("p.cp-hint", {}, say("plan.compare.tip"));
  const under = element("div.cp-under", {}, take, cost, compare, hint);
  const view = element("div.cp-plan", { tabindex: 0 }, report, under);
  const least = () => Math.min(MAX_HEIGHT, Math.max(MIN_HEIGHT, report.offsetHeight + under.offsetHeight + FRAME));
  addElementWidget(node, "cp_plan", view, { getMinHeight: least });
  for (const name of ["measure", "compare"]) hide(widgetOf(node, name));
  const grow = () => node.setSize([Math.max(node.size[0], WIDE + 40), Math.max(node.size[1], node.computeSize()[1])]);
  grow();
  watchConfig(node, report);
  const show = () => {
    const last = plans.get(place(node));
    if (!last) return;
    const { plan, planned } = last;
    report.replaceChildren(...shown(plan, node));
    node.cpPlanned = planned;
    take.disabled = cost.hidden = !plan.cost; // there is nothing to measure
    if (plan.cost) setText(cost, costText(plan.cost));
  };
  after(node, "onConfigure", () => setTimeout(show)); // when all nodes are there
  const before = node.onExecuted;
  node.onExecuted = function (/** @type {any} */ output) {
    before?.call(this, output);
    const plan = output?.cp_plan?.[0];
    if (!plan) return;
    plans.set(place(node), { plan, planned: settings(node) });
    show();
    grow();
  };
}

/**
 * Where it is: the same for the node that takes its place after an undo.
 * @param {any} node
 */
function place(node) {
  return `${node.graph?.rootGraph.id} ${node.graph?.id} ${node.id}`;
}

/**
 * The values of the CP Parallel Config that this plan is of.
 * @param {any} node
 */
function settings(node) {
  const config = configAbove(node);
  return JSON.stringify(config ? valuesOf(config) : {});
}

/**
 * @param {any} node
 * @param {HTMLElement} report
 */
function markOld(node, report) {
  const old = node.cpPlanned !== undefined && node.cpPlanned !== settings(node);
  const mark = report.querySelector(".cp-old");
  if (old && !mark) report.prepend(element("p.cp-note.cp-old", { role: "status" }, say("plan.old")));
  if (!old) mark?.remove();
}

/**
 * Marks a plan of an older config, while the node is on the canvas.
 * @param {any} node
 * @param {HTMLElement} report
 */
function watchConfig(node, report) {
  const timer = setInterval(() => markOld(node, report), LOOK_MILLISECONDS);
  after(node, "onRemoved", () => clearInterval(timer));
}

/**
 * @param {any} node
 * @param {string} name
 */
function widgetOf(node, name) {
  return node.widgets?.find((/** @type {any} */ widget) => widget.name === name);
}

/**
 * The button stands for it.
 * @param {any} widget
 */
function hide(widget) {
  if (!widget) return;
  widget.hidden = true;
  widget.options = Object.assign(widget.options ?? {}, { hidden: true });
}

/**
 * @param {any} node
 * @param {string} name of the widget that it sets
 * @param {string} idle its text
 * @param {string} busy its text while the node runs
 */
function runButton(node, name, idle, busy) {
  const onclick = () => runWith(widgetOf(node, name), node, button, idle, busy);
  const button = element("button.cp-button", { type: "button", onclick }, idle);
  return button;
}

/**
 * Run this node alone, once, with this widget on; the button says so until it ends.
 * @param {any} widget
 * @param {any} node
 * @param {any} button
 * @param {string} idle
 * @param {string} busy
 */
async function runWith(widget, node, button, idle, busy) {
  widget.value = true;
  button.disabled = true;
  setText(button, busy);
  let own = "";
  const ended = new Set(); // prompts, of which ours may be one before its id is known
  const look = (/** @type {any} */ event) => {
    ended.add(event.detail.prompt_id);
    if (ended.has(own)) done();
  };
  const done = () => {
    for (const name of ENDS) /** @type {EventTarget} */ (api).removeEventListener(name, look);
    button.disabled = false;
    setText(button, idle);
  };
  for (const name of ENDS) /** @type {EventTarget} */ (api).addEventListener(name, look);
  try {
    const queued = await /** @type {any} */ (app).queuePrompt(0, 1, [String(node.id)]);
    own = lastPrompt();
    if (queued === false || ended.has(own)) done();
  } finally {
    widget.value = false;
  }
}

/**
 * @param {Plan} plan
 * @param {any} node
 */
function shown({ troubles, rows, notes, parts, fix, times, split }, node) {
  const table = element(
    "table.cp-table",
    {},
    element("tbody", {}, ...rows.map(([name, value]) =>
      element("tr", {}, ...(name
        ? [element("th", { scope: "row" }, title(name)), element("td", {}, joinSentences(value))]
        : [element("td", { colspan: "2" }, joinSentences(value))])))),
  );
  const refused = troubles.map((trouble) => element("p.cp-trouble", { role: "alert" }, joinSentences(trouble)));
  const warnings = notes.map((note) => element("p.cp-note", {}, joinSentences(note)));
  const more = parts.length > SHOWN ? [element("p.cp-hint", {}, say("plan.more", { count: parts.length - SHOWN }))] : [];
  const words = split ? [element("p.cp-split", {}, shares(split.degrees, split.workers, split.cpu))] : [];
  return [
    ...refused, ...remedyButton(fix, node), ...words, ...warnings,
    ...(parts.length ? [picture(parts.slice(0, SHOWN)), ...more] : []), ...chart(times), table,
  ];
}

/** @param {Sentences} sentences */
function joinSentences(sentences) {
  return sentences.map(translate).join(" ");
}

/** @param {string} name */
function title(name) {
  return translate({ code: `title.${name.toLowerCase()}`, values: {} });
}

/**
 * The nearest setting that works; nothing where no CP Parallel Config is there to be set.
 * @param {import("./remedy.js").Change[]} fix
 * @param {any} node
 */
function remedyButton(fix, node) {
  const [use] = remedy(configAbove(node), fix, (setting) => use.replaceWith(element("p.cp-hint", { role: "status" }, say("plan.set", { setting }))));
  return use ? [use] : [];
}

/**
 * What measuring takes, before it is asked for.
 * @param {Cost} cost
 */
function costText({ steps, workers, cpu, seconds }) {
  const last = /** @type {number} */ (workers.at(-1));
  const who = [...workers.slice(0, -1), count(last, cpu)].join(", ");
  const time = seconds === null ? say("plan.cost.unknown") : say("plan.cost.known", { time: duration(seconds) });
  return `${say("plan.cost", { steps, who })} ${time}`;
}

/**
 * Seconds a step that were measured, and how the work was divided then.
 * @param {Time[]} measured
 */
function chart(measured) {
  if (!measured.length) return [];
  const longest = Math.max(...measured.map(({ seconds }) => seconds));
  const bars = measured.map(({ workers, cpu, degrees, seconds, times }) => {
    const who = [count(workers, cpu), divided(degrees)].filter(Boolean).join(", ");
    const faster = times ? say("plan.times", { times: fixed(times, 1) }) : "";
    return element(
      "li.cp-time", {},
      element("span.cp-who", { title: who }, who),
      element("span.cp-track", {}, element("span.cp-long", { style: `width: ${(100 * seconds) / longest}%` })),
      element("span.cp-took", {}, [say("step.seconds", { seconds: digits(seconds) }), faster].filter(Boolean).join(", ")),
    );
  });
  const title = say(measured.some(({ cpu, workers }) => cpu && workers > 1) ? "plan.measured.cpu" : "plan.measured");
  return [element("p.cp-hint", {}, title), element("ul.cp-chart", { "aria-label": title }, ...bars)];
}

/**
 * A row a worker, a column for each quantity that is divided; a worker's part is filled.
 * @param {Part[]} parts
 */
function picture(parts) {
  const columns = /** @type {const} */ (["tokens", "heads", "weights"]);
  const wide = (WIDE - LABEL - GAP * columns.length) / columns.length;
  const at = (/** @type {number} */ column) => LABEL + GAP + column * (wide + GAP);
  const heads = columns.map((name, column) =>
    svgElement("text", { x: at(column) + wide / 2, y: 12, "text-anchor": "middle", class: "cp-label" }, say(`plan.${name}`)));
  const rows = parts.flatMap((part, row) => {
    const y = 18 + row * (ROW + GAP);
    const label = svgElement("text", { x: 0, y: y + 13, class: "cp-label" }, `${part.rank}  ${[part.device, translate(part.lane)].filter(Boolean).join(" · ")}`);
    const bars = columns.flatMap((name, column) => {
      const [from, to] = part[name];
      const whole = svgElement("rect", { x: at(column), y, width: wide, height: ROW, rx: 3, class: "cp-whole" });
      const own = svgElement("rect", {
        x: at(column) + from * wide, y, width: Math.max(1, (to - from) * wide), height: ROW, rx: 3,
        class: `cp-part cp-part-${name}`,
      });
      own.append(svgElement("title", {}, `${say("rank", { rank: part.rank })}, ${say(`plan.${name}`)}: ${percent(from)} – ${percent(to)}`));
      return [whole, own];
    });
    return [label, ...bars];
  });
  const high = 18 + parts.length * (ROW + GAP);
  return svgElement(
    "svg",
    { viewBox: `0 0 ${WIDE} ${high}`, role: "img", "aria-label": say("plan.picture"), class: "cp-picture" },
    ...heads, ...rows,
  );
}

/** @param {number} share */
function percent(share) {
  return `${Math.round(share * 100)} %`;
}
