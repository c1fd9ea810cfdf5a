/** "Run on several GPUs" and the way back: a native sampler becomes its CP node, links, widgets and number included, and
 * one of a pack gets a CP Model before it; a large text encoder gets a CP CLIP. One step to undo, for one node, a
 * subgraph, or the workflow. */

import { app } from "../../scripts/app.js";
import { clipsOf, largeEncoders, putClip } from "./encoders.js";
import { TO_CP, allNodes, connectConfig, rootGraph } from "./graph.js";
import { MODEL, modelsOf, putModels, takeAway, wantsModel } from "./models.js";
import { tell } from "./notices.js";
import { gpus } from "./status.js";
import { say } from "./words.js";

const TO_NATIVE = Object.fromEntries(Object.entries(TO_CP).map(([native, ours]) => [ours, native]));

const KEPT = ["mode", "color", "bgcolor", "shape"];
const ORIGIN = ["cnr_id", "aux_id", "ver", "Node name for S&R"]; // properties that name a node's class and pack
const NOTICE_MILLISECONDS = 6000;
const ONE_GPU_MILLISECONDS = 15000;

/** @typedef {import("./graph.js").LGraphNode} LGraphNode
 * @typedef {Record<string, string>} Types what becomes what */

/**
 * The entries of a node's context menu: for what is selected, if the node is; for all that a subgraph contains.
 * @param {LGraphNode} node
 */
export function menuItems(node) {
  const selected = [...app.canvas.selectedItems];
  const nodes = selected.includes(node) ? selected : [node];
  return [
    ...entry(say("menu.run"), samplers(nodes, TO_CP), TO_CP),
    ...entry(backTo(samplers(nodes, TO_NATIVE)), samplers(nodes, TO_NATIVE), TO_NATIVE),
  ];
}

/** The entries of the empty canvas' context menu: for every sampler of the workflow. */
export function canvasItems() {
  const nodes = rootGraph().nodes;
  const entries = [
    ...entry(say("menu.run.all"), samplers(nodes, TO_CP), TO_CP),
    ...entry(say("menu.back.all"), samplers(nodes, TO_NATIVE), TO_NATIVE),
  ];
  return entries.length ? [null, ...entries] : [];
}

/** @returns {any[]} what registerExtension takes: of what is selected, or else of the whole workflow */
export function migrateCommands() {
  const icon = "icon-[lucide--cpu]";
  const command = (/** @type {string} */ id, /** @type {string} */ label, /** @type {() => void} */ act) =>
    ({ id: `CPSampler.${id}`, label, icon, function: act });
  return [
    command("Migrate", say("menu.run"), () => migrateSelected(TO_CP)),
    command("MigrateAll", say("menu.run.all"), () => migrateAll(TO_CP)),
    command("MigrateBack", backTo([]), () => migrateSelected(TO_NATIVE)),
    command("MigrateAllBack", say("menu.back.all"), () => migrateAll(TO_NATIVE)),
  ];
}

/**
 * The commands that the toolbox above a selected node offers.
 * @param {LGraphNode} node
 */
export function toolboxCommands(node) {
  return [
    ...(samplers([node], TO_CP).length ? ["CPSampler.Migrate"] : []),
    ...(samplers([node], TO_NATIVE).length ? ["CPSampler.MigrateBack"] : []),
  ];
}

/** @param {Types} types */
function migrateSelected(types) {
  const selected = [...app.canvas.selectedItems];
  if (selected.length) migrate(samplers(selected, types), types);
  else migrateAll(types);
}

/** @param {Types} types */
function migrateAll(types) {
  migrate(samplers(rootGraph().nodes, types), types);
}

/**
 * @param {string} content
 * @param {LGraphNode[]} nodes
 * @param {Types} types
 */
function entry(content, nodes, types) {
  return nodes.length ? [{ content, callback: () => migrate(nodes, types) }] : [];
}

/**
 * "Back to KSampler", by the native node's own title.
 * @param {LGraphNode[]} nodes
 */
function backTo(nodes) {
  const kinds = [...new Set(nodes.map((node) => TO_NATIVE[node.type] ?? node.getOutputNodes(0)?.[0]?.type ?? "KSampler"))];
  const native = kinds.length === 1 ? kinds[0] : "KSampler";
  return say("menu.back", { node: LiteGraph.registered_node_types[native]?.title ?? native });
}

/**
 * The samplers among `nodes`, and in the subgraphs among them, each once however often its subgraph is used; on the way
 * back, the CP Models before them too.
 * @param {LGraphNode[]} nodes
 * @param {Types} types
 * @returns {LGraphNode[]}
 */
function samplers(nodes, types) {
  const graphs = new Set();
  const visit = (/** @type {LGraphNode[]} */ some) => {
    /** @type {LGraphNode[]} */
    const result = [];
    for (const node of some) {
      if (Object.hasOwn(types, node?.type ?? "") || (types === TO_CP ? wantsModel(node) : node?.type === MODEL)) result.push(node);
      else if (types === TO_NATIVE) result.push(...modelsOf(node));
      const graph = node?.subgraph;
      if (!graph || graphs.has(graph)) continue;
      graphs.add(graph);
      result.push(...visit(graph.nodes));
    }
    return result;
  };
  return [...new Set(visit(nodes))];
}

/**
 * @param {LGraphNode[]} nodes
 * @param {Types} types
 */
async function migrate(nodes, types) {
  if (!nodes.length) {
    tell("info", say("migrate.none"), say("migrate.none.detail"), NOTICE_MILLISECONDS, []);
    return;
  }
  const large = types === TO_CP ? await largeEncoders(nodes) : [];
  const hosts = hostValues();
  app.canvas.emitBeforeChange();
  try {
    app.canvas.deselectAll();
    for (const loader of large) putClip(loader);
    for (const clip of types === TO_NATIVE ? clipsOf(nodes) : []) takeAway(clip);
    const replaced = nodes.map((node) => changed(node, types)).filter(Boolean);
    const made = replaced.filter((node) => Object.values(types).includes(node.type));
    for (const node of made) if (node.graph === app.canvas.graph) app.canvas.select(node);
    restore(hosts);
    // the order is saved too: computed only when it runs, it would be a step of its own to undo
    for (const graph of new Set(replaced.map((node) => node.graph))) graph.updateExecutionOrder();
  } finally {
    app.canvas.emitAfterChange();
  }
  report(nodes.length, types);
}

/**
 * @param {LGraphNode} node
 * @param {Types} types
 * @returns {LGraphNode} the sampler
 */
function changed(node, types) {
  if (Object.hasOwn(types, node.type)) return replace(node, types[node.type]);
  return node.type === MODEL ? takeAway(node) : putModels(node);
}

/**
 * @param {number} count
 * @param {Types} types
 */
function report(count, types) {
  const [one, several] = types === TO_CP ? ["migrate.run.one", "migrate.run"] : ["migrate.back.one", "migrate.back"];
  const alone = types === TO_CP && gpus() === 1;
  const detail = alone ? say("one.hint") : say("migrate.undo");
  tell("info", say(count === 1 ? one : several, { count }), detail, alone ? ONE_GPU_MILLISECONDS : NOTICE_MILLISECONDS, []);
}

/**
 * A node of `type` in the place of `old`, under its number, which subgraphs and apps refer to.
 * @param {LGraphNode} old
 * @param {string} type
 * @returns {LGraphNode}
 */
function replace(old, type) {
  const { graph, id } = old;
  const node = LiteGraph.createNode(type);
  for (const name of KEPT) if (old[name] !== undefined) node[name] = old[name];
  node.flags = { ...old.flags };
  const properties = Object.entries(old.properties ?? {}).filter(([name]) => !ORIGIN.includes(name));
  Object.assign(node.properties, Object.fromEntries(properties));
  if (old.title !== old.constructor.title) node.title = old.title;
  const widgets = new Map((old.widgets ?? []).map((/** @type {any} */ widget) => [widget.name, widget.value]));
  const size = [Math.max(node.size[0], old.size[0]), Math.max(node.size[1], old.size[1])];
  const position = [...old.pos];
  const links = linksOf(old);
  graph.remove(old);
  node.id = id;
  graph.add(node);
  node.pos = position;
  node.setSize(size);
  for (const widget of node.widgets ?? []) if (widgets.has(widget.name)) widget.value = widgets.get(widget.name);
  connect(node, links);
  connectConfig(node);
  graph.setDirtyCanvas(true, true);
  return node;
}

/** @typedef {{name: string, label?: string, origin_id: any, origin_slot: number, target_id: any, target_slot: number,
 *   parentId?: any, bends: number[][]}} Link `bends` are where its reroutes are, from its origin on */

/**
 * @param {LGraphNode} node
 * @returns {{inputs: Link[], outputs: Link[], labels: Map<string, string>}}
 */
function linksOf({ graph, inputs, outputs }) {
  const at = (/** @type {string} */ name, /** @type {any} */ id) => {
    const link = graph.getLink(id);
    if (!link) return [];
    const { origin_id, origin_slot, target_id, target_slot, parentId } = link;
    const reroutes = link.constructor.getReroutes?.(graph, link) ?? [];
    const bends = reroutes.map((/** @type {any} */ one) => [...one.pos]);
    return [{ name, origin_id, origin_slot, target_id, target_slot, parentId, bends }];
  };
  const labelled = [...inputs, ...outputs].filter(({ label }) => label);
  return {
    inputs: inputs.flatMap((/** @type {any} */ slot) => (slot.link == null ? [] : at(slot.name, slot.link))),
    outputs: outputs.flatMap((/** @type {any} */ slot) =>
      (slot.links ?? []).flatMap((/** @type {any} */ id) => at(slot.name, id))),
    labels: new Map(labelled.map(({ name, label }) => [name, label])),
  };
}

/**
 * By name: sockets of the two nodes have other numbers. An input that `node` does not have, its config, is left out.
 * @param {LGraphNode} node
 * @param {ReturnType<typeof linksOf>} links
 */
function connect(node, { inputs, outputs, labels }) {
  const { graph } = node;
  const from = (/** @type {Link} */ link) => (graph.reroutes?.has(link.parentId) ? link.parentId : undefined);
  const bend = (/** @type {any} */ link, /** @type {Link} */ before) => {
    if (link && link.parentId === undefined) for (const position of before.bends) graph.createReroute?.(position, link);
  };
  for (const slot of [...node.inputs, ...node.outputs]) if (labels.has(slot.name)) slot.label = labels.get(slot.name);
  for (const link of inputs) {
    const slot = node.findInputSlot(link.name);
    if (slot < 0) continue;
    const origin = graph.getNodeById(link.origin_id);
    const border = graph.inputNode?.slots[link.origin_slot]; // of a subgraph
    bend(origin ? origin.connect(link.origin_slot, node, slot, from(link)) : border?.connect(node.inputs[slot], node, from(link)), link);
  }
  for (const link of outputs) {
    const slot = node.findOutputSlot(link.name);
    const target = graph.getNodeById(link.target_id);
    const border = graph.outputNode?.slots[link.target_slot];
    bend(target ? node.connect(slot, target, link.target_slot, from(link)) : border?.connect(node.outputs[slot], node, from(link)), link);
  }
}

/** The values of widgets that subgraph nodes show of nodes inside: they go when their inner link does. */
function hostValues() {
  const hosts = allNodes().filter((node) => node.subgraph);
  return hosts.map((/** @type {LGraphNode} */ host) => ({
    host, values: new Map((host.widgets ?? []).map((/** @type {any} */ widget) => [widget.name, widget.value])),
  }));
}

/** @param {ReturnType<typeof hostValues>} hosts */
function restore(hosts) {
  for (const { host, values } of hosts) {
    for (const widget of host.widgets ?? []) if (values.has(widget.name)) widget.value = values.get(widget.name);
  }
}
