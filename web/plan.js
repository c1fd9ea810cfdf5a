/** CP Plan's report on its node: a table, and a picture of which worker holds which part. */

import { drawn, element } from "./elements.js";
import { say } from "./words.js";

export const PLAN = "CPPlan";
const LEAST = 150; // pixels
const MOST = 620;
const FRAME = 40; // around the report
const SHOWN = 16; // workers; more would be too thin to read
const WIDE = 360;
const LABEL = 96;
const ROW = 18;
const GAP = 4;

/**
 * @typedef {{rank: number, device: string, lane: string, tokens: [number, number], heads: [number, number],
 *   weights: [number, number]}} Part shares from 0 to 1
 * @typedef {{troubles: string[], rows: [string, string][], notes: string[], parts: Part[]}} Plan
 */

/** @param {any} node a new CP Plan */
export function addPlan(node) {
  const report = element("div.cp-report", {}, element("p.cp-hint", {}, say("plan.empty")));
  const place = element("div.cp-plan", { tabindex: 0 }, report);
  const widget = node.addDOMWidget("cp_plan", "cp_plan", place, {
    serialize: false, getMinHeight: () => Math.min(MOST, Math.max(LEAST, report.offsetHeight + FRAME)), getValue: () => "", setValue() {},
  });
  widget.serialize = false;
  const grow = () => node.setSize([Math.max(node.size[0], WIDE + 40), Math.max(node.size[1], node.computeSize()[1])]);
  grow();
  const before = node.onExecuted;
  node.onExecuted = function (/** @type {any} */ output) {
    before?.call(this, output);
    const plan = output?.cp_plan?.[0];
    if (!plan) return;
    report.replaceChildren(...shown(plan));
    grow();
  };
}

/** @param {Plan} plan */
function shown({ troubles, rows, notes, parts }) {
  const table = element(
    "table.cp-table",
    {},
    element("tbody", {}, ...[...troubles.map((trouble) => ["", trouble]), ...rows].map(([name, value]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)))),
  );
  const warnings = notes.map((note) => element("p.cp-note", {}, note));
  const more = parts.length > SHOWN ? [element("p.cp-hint", {}, say("plan.more", { count: parts.length - SHOWN }))] : [];
  return [...warnings, ...(parts.length ? [picture(parts.slice(0, SHOWN)), ...more] : []), table];
}

/**
 * A row a worker, a column for each thing that is shared out; what a worker holds is filled.
 * @param {Part[]} parts
 */
function picture(parts) {
  const columns = /** @type {const} */ (["tokens", "heads", "weights"]);
  const wide = (WIDE - LABEL - GAP * columns.length) / columns.length;
  const at = (/** @type {number} */ column) => LABEL + GAP + column * (wide + GAP);
  const heads = columns.map((name, column) =>
    drawn("text", { x: at(column) + wide / 2, y: 12, "text-anchor": "middle", class: "cp-label" }, say(`plan.${name}`)));
  const rows = parts.flatMap((part, row) => {
    const y = 18 + row * (ROW + GAP);
    const label = drawn("text", { x: 0, y: y + 13, class: "cp-label" }, `${part.rank}  ${[part.device, part.lane].filter(Boolean).join(" · ")}`);
    const bars = columns.flatMap((name, column) => {
      const [from, to] = part[name];
      const whole = drawn("rect", { x: at(column), y, width: wide, height: ROW, rx: 3, class: "cp-whole" });
      const own = drawn("rect", {
        x: at(column) + from * wide, y, width: Math.max(1, (to - from) * wide), height: ROW, rx: 3,
        class: `cp-part cp-part-${name}`,
      });
      own.append(drawn("title", {}, `${say("rank", { rank: part.rank })}, ${say(`plan.${name}`)}: ${percent(from)} – ${percent(to)}`));
      return [whole, own];
    });
    return [label, ...bars];
  });
  const high = 18 + parts.length * (ROW + GAP);
  return drawn(
    "svg",
    { viewBox: `0 0 ${WIDE} ${high}`, role: "img", "aria-label": say("plan.picture"), class: "cp-picture" },
    ...heads, ...rows,
  );
}

/** @param {number} share */
function percent(share) {
  return `${Math.round(share * 100)} %`;
}
