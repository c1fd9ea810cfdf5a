/** CP Model before sampler nodes of packs, which have no CP node of their own, and away again. */

import { TO_CP, connectConfig } from "./graph.js";

export const MODEL = "CPModel";
export const GAP = 70; // pixels: a title and a row of badges

/** @typedef {import("./graph.js").LGraphNode} LGraphNode
 * @typedef {{origin_id: any, origin_slot: number}} Origin */

/**
 * Does it sample a MODEL that comes from no CP Model? A node that samples has a seed, steps and a cfg.
 * @param {LGraphNode} node
 */
export function wantsModel(node) {
  const widgets = new Set((node?.widgets ?? []).map((/** @type {any} */ widget) => widget.name));
  const has = (/** @type {string[]} */ ...names) => names.some((name) => widgets.has(name));
  return !Object.values(TO_CP).includes(node?.type) && has("seed", "noise_seed") && has("steps") && has("cfg") && slots(node).length > 0;
}

/**
 * The inputs of a node that get a MODEL, but not from CP Model.
 * @param {LGraphNode} node
 * @returns {number[]}
 */
function slots(node) {
  const linked = [...node.inputs.keys()].filter((slot) => node.inputs[slot].type === "MODEL" && node.inputs[slot].link != null);
  return linked.filter((slot) => node.getInputNode(slot)?.type !== MODEL);
}

/**
 * The CP Models that a node's inputs come from.
 * @param {LGraphNode} node
 * @returns {LGraphNode[]}
 */
export function modelsOf(node) {
  return [...(node?.inputs ?? []).keys()].map((slot) => node.getInputNode(slot)).filter((one) => one?.type === MODEL);
}

/**
 * A CP Model before each MODEL input of a sampler node; inputs with the same origin share one.
 * @param {LGraphNode} node
 */
export function putModels(node) {
  const { graph } = node;
  for (const slot of slots(node)) {
    const { origin_id, origin_slot } = graph.getLink(node.inputs[slot].link);
    const known = graph.nodes.find((/** @type {LGraphNode} */ one) => {
      const link = one.type === MODEL && graph.getLink(one.inputs[one.findInputSlot("model")].link);
      return link && link.origin_id === origin_id && link.origin_slot === origin_slot;
    });
    (known ?? newModel(node, { origin_id, origin_slot })).connect(0, node, slot);
  }
  return node;
}

/**
 * @param {LGraphNode} sampler
 * @param {Origin} origin
 */
function newModel(sampler, origin) {
  const { graph } = sampler;
  const made = LiteGraph.createNode(MODEL);
  graph.add(made);
  made.pos = [sampler.pos[0], sampler.pos[1] - made.size[1] - GAP];
  join(graph, origin, made, made.findInputSlot("model"));
  connectConfig(made);
  return made;
}

/**
 * Takes a CP Model or CP CLIP away: what it fed gets what it got.
 * @param {LGraphNode} node
 * @returns {LGraphNode | undefined} a node that it fed
 */
export function takeAway(node) {
  const { graph } = node;
  const link = graph.getLink(node.inputs[0].link);
  const origin = link && { origin_id: link.origin_id, origin_slot: link.origin_slot };
  const targets = targetsOf(node, 0);
  graph.remove(node);
  for (const target of targets) if (origin) join(graph, origin, target.node, target.slot);
  return targets[0]?.node;
}

/**
 * The inputs of nodes that an output goes to.
 * @param {LGraphNode} node
 * @param {number} output
 * @returns {{node: LGraphNode, slot: number}[]}
 */
export function targetsOf(node, output) {
  const links = (node.outputs[output].links ?? []).map((/** @type {any} */ id) => node.graph.getLink(id));
  const all = links.map((/** @type {any} */ link) => ({ node: node.graph.getNodeById(link.target_id), slot: link.target_slot }));
  return all.filter((/** @type {any} */ target) => target.node);
}

/**
 * @param {any} graph
 * @param {Origin} origin a node's output, or where a subgraph gets it from
 * @param {LGraphNode} node
 * @param {number} slot
 */
function join(graph, { origin_id, origin_slot }, node, slot) {
  const origin = graph.getNodeById(origin_id);
  if (origin) origin.connect(origin_slot, node, slot);
  else graph.inputNode?.slots[origin_slot]?.connect(node.inputs[slot], node);
}
