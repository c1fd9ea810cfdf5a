/** The nodes of a workflow, subgraphs included: which are ours, and where they are. Knows nothing of workers. */

import { app } from "../../scripts/app.js";

/** @typedef {any} LGraphNode frontend's types change between versions; what is used here is LiteGraph's oldest part
 * @typedef {any} LGraph */

export const CONFIG = "CPParallelConfig";
/** Which CP node replaces which native one; parallel_runtime/commands/migrate.py has the same for saved files. */
export const TO_CP = {
  KSampler: "CPSampler",
  KSamplerAdvanced: "CPSamplerAdvanced",
  SamplerCustomAdvanced: "CPSamplerCustom",
  SamplerCustom: "CPSamplerCustomBasic",
};

const ALWAYS = 0; // neither muted nor bypassed

/** @returns {LGraph} the workflow's own graph, also while a subgraph is open */
export function rootGraph() {
  return app.rootGraph ?? app.graph;
}

/** @returns {LGraphNode[]} the nodes of the workflow and of its subgraphs */
export function allNodes() {
  const root = rootGraph();
  return [root, ...(root.subgraphs?.values() ?? [])].flatMap((graph) => graph.nodes);
}

/**
 * Ids of nodes in subgraphs are paths, such as 12:3.
 * @param {string} id
 * @returns {LGraphNode | undefined}
 */
export function nodeOf(id) {
  let graph = rootGraph();
  const steps = id.split(":");
  for (const step of steps.slice(0, -1)) graph = graph?.getNodeById(step)?.subgraph;
  return graph?.getNodeById(steps[steps.length - 1]) ?? undefined;
}

/**
 * The nearest CP Parallel Config above a node.
 * @param {LGraphNode} node
 * @returns {LGraphNode | undefined}
 */
export function configAbove(node) {
  return nodesAbove([node]).find((one) => one !== node && one.comfyClass === CONFIG);
}

/**
 * These nodes, and all that they get something from in their graph, the nearest first.
 * @param {LGraphNode[]} nodes
 * @returns {LGraphNode[]}
 */
export function nodesAbove(nodes) {
  const visited = new Set(nodes);
  for (const one of visited) {
    for (const index of (one.inputs ?? []).keys()) {
      const origin = one.getInputNode(index);
      if (origin) visited.add(origin);
    }
  }
  return [...visited];
}

/**
 * Where the graph has one CP Parallel Config, it is meant for this node too.
 * @param {LGraphNode} node
 */
export function connectConfig(node) {
  const slot = node.findInputSlot("cp_config");
  if (slot < 0) return;
  const configs = node.graph.nodes.filter((/** @type {LGraphNode} */ one) => one.type === CONFIG && one.mode === ALWAYS);
  if (configs.length === 1 && node.getInputLink(slot) == null) configs[0].connect(0, node, slot);
}

/**
 * Call `act` after each call of the owner's method.
 * @param {any} owner
 * @param {string} name of the method, which need not be there
 * @param {() => void} act
 */
export function after(owner, name, act) {
  const before = owner[name];
  owner[name] = function (/** @type {any[]} */ ...args) {
    const result = before?.apply(this, args);
    act();
    return result;
  };
}
