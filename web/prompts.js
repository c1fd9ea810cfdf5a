/** Which workflow a prompt is of: nodes are told by number, and another workflow with the same numbers may be open by now. */

import { api } from "../../scripts/api.js";
import { rootGraph } from "./graph.js";

/** @type {Map<string, string>} ids of graphs, by that of the prompt that this page made of each */
const graphs = new Map();
/** @type {Promise<unknown>} */
let queueing = Promise.resolve();
let last = "";

/** Notes the id of every prompt that this page queues from now on. */
export function startPrompts() {
  const page = /** @type {any} */ (api);
  const queue = page.queuePrompt;
  page.queuePrompt = function (/** @type {any[]} */ ...given) {
    const graph = given[1]?.workflow?.id ?? rootGraph().id;
    const answer = queue.apply(this, given);
    queueing = answer.then((/** @type {any} */ { prompt_id: id }) => graphs.set((last = id), graph), () => {});
    return answer;
  };
}

/** The prompt that was queued last. */
export const lastPrompt = () => last;

/** @type {() => Promise<unknown>} until the ids of all prompts that are being queued are known: ComfyUI may be faster */
export const known = () => queueing;

/**
 * Is its workflow the one that is open? Of a prompt from before the page was loaded nobody knows.
 * @param {string} prompt
 */
export function isOpen(prompt) {
  return (graphs.get(prompt) ?? rootGraph().id) === rootGraph().id;
}
