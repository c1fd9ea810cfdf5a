/** What a report of a fault needs, as text: state, log, versions. No path of a model, no prompt, no picture. */

import { api } from "../../scripts/api.js";

const LINES = 200;

/** @returns {Promise<string>} */
export async function diagnostics() {
  const [status, logs, system] = await Promise.all([
    read("/cp/status"), read(`/cp/logs?lines=${LINES}`), read("/system_stats"),
  ]);
  const { argv: _, ...versions } = system.system ?? {};
  const lines = (logs.lines ?? []).map((/** @type {{at: number, text: string}} */ line) =>
    `${new Date(line.at * 1000).toISOString()} ${line.text}`,
  );
  const facts = JSON.stringify({ status, system: versions, devices: system.devices }, null, 1);
  return `### CP Sampler diagnostics\n\`\`\`json\n${facts}\n\`\`\`\n### Log\n\`\`\`\n${lines.join("\n")}\n\`\`\`\n`;
}

/**
 * Also where the page came over plain HTTP from another machine: browsers keep their clipboard from it.
 * @param {string} text
 */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/**
 * @param {string} route
 * @returns {Promise<any>}
 */
async function read(route) {
  const answer = await api.fetchApi(route);
  return answer.ok ? answer.json() : { error: answer.status };
}
