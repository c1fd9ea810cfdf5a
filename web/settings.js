/** What ComfyUI's Settings show of this pack. nodes/describe/host.py reads what was saved; nothing has to be restarted. */

import { say } from "./words.js";

const GROUP = "CP Sampler";
const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR"];

/** @returns {any[]} what registerExtension takes */
export function settings() {
  const all = [
    { ...entry("Devices", "devices", ""), type: "text" },
    number("RingDegree", "ring", 0, { min: 0, max: 64 }),
    number("UlyssesDegree", "ulysses", 0, { min: 0, max: 64 }),
    { ...entry("StartWithComfyUI", "start", false), type: "boolean" },
    number("IdleSeconds", "idle", 0, { min: 0, max: 86400 }),
    number("StallSeconds", "stall", 120, { min: 1, max: 86400 }),
    { ...entry("LogLevel", "log", "INFO"), type: "combo", options: LEVELS },
  ];
  return all.map((one, place) => ({ ...one, sortOrder: all.length - place })); // ComfyUI shows the highest first
}

/**
 * @param {string} id
 * @param {string} word
 * @param {unknown} usual
 */
function entry(id, word, usual) {
  return {
    id: `CPSampler.${id}`, name: say(`settings.${word}`), tooltip: say(`settings.${word}.tip`),
    category: [GROUP, GROUP, id], defaultValue: usual,
  };
}

/**
 * @param {string} id
 * @param {string} word
 * @param {number} usual
 * @param {{min: number, max: number}} limits
 */
function number(id, word, usual, limits) {
  return { ...entry(id, word, usual), type: "number", attrs: { ...limits, step: 1, showButtons: true } };
}
