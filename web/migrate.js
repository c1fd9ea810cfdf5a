/** "Run on several GPUs": puts the CP node in a native sampler's place, links, widgets and all. One step to undo. */

import { app } from "../../scripts/app.js";
import { CONFIG } from "./config.js";
import { tell } from "./notices.js";
import { gpus } from "./status.js";
import { say } from "./words.js";

/** What stands in for what; parallel_runtime/commands/migrate.py has the same for saved files. */
const STANDS_IN = {
  KSampler: "CPSampler",
  KSamplerAdvanced: "CPSamplerAdvanced",
  SamplerCustomAdvanced: "CPSamplerCustom",
  SamplerCustom: "CPSamplerCustomBasic",
};

const ALWAYS = 0; // neither muted nor bypassed
const TOLD_MILLISECONDS = 15000;

/** @typedef {any} LGraphNode frontend's types change between versions; what is used here is LiteGraph's oldest part */

/**
 * The entries of a node's context menu.
 * @param {LGraphNode} node
 */
export function menuItems(node) {
  const chosen = migratable(node);
  return chosen.length ? [{ content: say("menu.run"), callback: () => migrate(chosen) }] : [];
}

/** Everything that is selected, as a command. */
export function migrateSelected() {
  migrate([...app.canvas.selectedItems].filter(standsIn));
}

/** @param {LGraphNode} node */
export function standsIn(node) {
  return Object.hasOwn(STANDS_IN, node?.type ?? "");
}

/** @param {LGraphNode} node */
function migratable(node) {
  if (!standsIn(node)) return [];
  const selected = [...app.canvas.selectedItems].filter(standsIn);
  return selected.includes(node) ? selected : [node];
}

/** @param {LGraphNode[]} nodes */
function migrate(nodes) {
  const graph = nodes[0]?.graph;
  if (!graph) return;
  app.canvas.emitBeforeChange();
  try {
    app.canvas.deselectAll();
    for (const made of nodes.map(replace)) app.canvas.select(made);
    graph.updateExecutionOrder(); // it is saved too: worked out only when it runs, it would be a step of its own to undo
  } finally {
    app.canvas.emitAfterChange();
  }
  if (gpus() === 1) tell("info", say("one.title"), say("one.hint"), TOLD_MILLISECONDS);
}

/**
 * @param {LGraphNode} old
 * @returns {LGraphNode}
 */
function replace(old) {
  const { graph } = old;
  const made = LiteGraph.createNode(STANDS_IN[/** @type {keyof typeof STANDS_IN} */ (old.type)]);
  graph.add(made);
  for (const name of ["mode", "color", "bgcolor", "shape"]) if (old[name] !== undefined) made[name] = old[name];
  made.pos = [...old.pos];
  made.setSize([Math.max(made.size[0], old.size[0]), Math.max(made.size[1], old.size[1])]);
  if (old.title !== old.constructor.title) made.title = old.title;
  copyWidgets(old, made);
  const links = linksOf(old);
  graph.remove(old);
  connect(made, links);
  connectConfig(made);
  graph.setDirtyCanvas(true, true);
  return made;
}

/**
 * By name, so that no widget can get its neighbour's value.
 * @param {LGraphNode} old
 * @param {LGraphNode} made
 */
function copyWidgets(old, made) {
  const values = new Map((old.widgets ?? []).map((/** @type {any} */ widget) => [widget.name, widget.value]));
  for (const widget of made.widgets ?? []) {
    if (values.has(widget.name)) widget.value = values.get(widget.name);
  }
}

/** @param {LGraphNode} old */
function linksOf(old) {
  const { graph } = old;
  const inputs = old.inputs
    .map((/** @type {any} */ slot, /** @type {number} */ index) => ({ name: slot.name, link: old.getInputLink(index) }))
    .filter((/** @type {any} */ { link }) => link);
  const outputs = old.outputs.flatMap((/** @type {any} */ slot, /** @type {number} */ index) =>
    (slot.links ?? []).map((/** @type {any} */ id) => ({ index, link: graph.getLink(id) })),
  );
  const at = (/** @type {any} */ link) => ({
    origin_id: link.origin_id, origin_slot: link.origin_slot, target_id: link.target_id, target_slot: link.target_slot,
  });
  return {
    graph,
    inputs: inputs.map((/** @type {any} */ { name, link }) => ({ name, ...at(link) })),
    outputs: outputs.map((/** @type {any} */ { index, link }) => ({ index, ...at(link) })),
  };
}

/**
 * @param {LGraphNode} made
 * @param {ReturnType<typeof linksOf>} links
 */
function connect(made, { graph, inputs, outputs }) {
  for (const { name, origin_id, origin_slot } of inputs) {
    const slot = made.findInputSlot(name);
    const origin = graph.getNodeById(origin_id);
    if (origin) origin.connect(origin_slot, made, slot);
    else graph.inputNode?.slots[origin_slot]?.connect(made.inputs[slot], made); // the border of a subgraph
  }
  for (const { index, target_id, target_slot } of outputs) {
    const target = graph.getNodeById(target_id);
    if (target) made.connect(index, target, target_slot);
    else graph.outputNode?.slots[target_slot]?.connect(made.outputs[index], made);
  }
}

/**
 * Where the graph has one CP Parallel Config, it is meant for this node too.
 * @param {LGraphNode} made
 */
function connectConfig(made) {
  const configs = made.graph.nodes.filter((/** @type {LGraphNode} */ node) => node.type === CONFIG && node.mode === ALWAYS);
  const slot = made.findInputSlot("cp_config");
  if (configs.length === 1 && made.getInputLink(slot) == null) configs[0].connect(0, made, slot);
}
