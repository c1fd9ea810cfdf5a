/** CP CLIP after the loaders of text encoders where that pays, and away again. */

import { api } from "../../scripts/api.js";
import { TO_CP, connectConfig, nodesAbove } from "./graph.js";
import { GAP, targetsOf } from "./models.js";

export const CLIP = "CPCLIP";
const LOADED_THERE = "CPLoadCLIP"; // has its text encoder in the workers already

/** @typedef {import("./graph.js").LGraphNode} LGraphNode */

/**
 * The loaders above these samplers whose text encoder is large, or has no room beside the network: the server knows the
 * files.
 * @param {LGraphNode[]} samplers
 * @returns {Promise<LGraphNode[]>}
 */
export async function largeEncoders(samplers) {
  const above = nodesAbove(samplers);
  const wants = (/** @type {LGraphNode} */ node) => targets(node).some((target) => target.node.type !== CLIP);
  const loaders = above.filter((node) => makes(node, "CLIP") && node.type !== LOADED_THERE && wants(node));
  const networks = above.filter((node) => makes(node, "MODEL")).flatMap(texts);
  const answers = loaders.map(async (loader) => {
    const query = new URLSearchParams([...texts(loader).map((name) => ["clip", name]), ...networks.map((name) => ["model", name])]);
    const answer = await api.fetchApi(`/cp/encoder?${query}`);
    return answer.ok && (await answer.json()).pays;
  });
  const pays = await Promise.all(answers);
  return loaders.filter((_, index) => pays[index]);
}

/**
 * Does it load one, rather than change one that it gets?
 * @param {LGraphNode} node
 * @param {string} type
 */
function makes(node, type) {
  const has = (/** @type {any[] | undefined} */ slots) => (slots ?? []).some((slot) => slot.type === type);
  return has(node.outputs) && !has(node.inputs);
}

/**
 * What its widgets say: the names of its files among them.
 * @param {LGraphNode} node
 * @returns {string[]}
 */
function texts(node) {
  return (node.widgets ?? []).map((/** @type {any} */ widget) => widget.value).filter((/** @type {any} */ value) => typeof value === "string");
}

/** @param {LGraphNode} loader */
function targets(loader) {
  return targetsOf(loader, loader.outputs.findIndex((/** @type {any} */ slot) => slot.type === "CLIP"));
}

/**
 * A CP CLIP between a loader and all nodes that get its CLIP, on the next free place below it.
 * @param {LGraphNode} loader
 */
export function putClip(loader) {
  const { graph } = loader;
  const fed = targets(loader);
  const made = LiteGraph.createNode(CLIP);
  graph.add(made);
  made.pos = [loader.pos[0], loader.pos[1] + loader.size[1] + GAP];
  const covers = (/** @type {LGraphNode} */ other) =>
    other !== made && [0, 1].every((axis) => other.pos[axis] < made.pos[axis] + made.size[axis] + GAP * axis
      && made.pos[axis] < other.pos[axis] + other.size[axis] + GAP * axis);
  for (let other = graph.nodes.find(covers); other; other = graph.nodes.find(covers)) {
    made.pos = [made.pos[0], other.pos[1] + other.size[1] + GAP];
  }
  loader.connect(loader.outputs.findIndex((/** @type {any} */ slot) => slot.type === "CLIP"), made, 0);
  for (const { node, slot } of fed) made.connect(0, node, slot);
  connectConfig(made);
}

/**
 * The CP CLIPs above these samplers that no other CP sampler of their graph needs.
 * @param {LGraphNode[]} samplers
 * @returns {LGraphNode[]}
 */
export function clipsOf(samplers) {
  const ours = Object.values(TO_CP);
  const staying = samplers.flatMap((node) => node.graph.nodes).filter((node) => ours.includes(node.type) && !samplers.includes(node));
  const needed = new Set(nodesAbove(staying));
  return nodesAbove(samplers).filter((node) => node.type === CLIP && !needed.has(node));
}
