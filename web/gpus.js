/** The GPUs of ComfyUI's machine as a list to choose from. It writes the widget `devices`, which takes any text. */

import { element } from "./elements.js";
import { gpuParts } from "./rank.js";
import { gpuList } from "./status.js";

/**
 * @param {(devices: string) => void} set
 */
export function gpuChoice(set) {
  const list = element("div.cp-gpus");
  const boxes = () => /** @type {HTMLInputElement[]} */ ([...list.querySelectorAll("input")]);
  const choose = () => {
    const chosen = boxes().filter((box) => box.checked).map((box) => box.value);
    set(chosen.length === boxes().length ? "" : chosen.join(","));
  };
  return {
    element: list,
    /**
     * @param {string} devices
     * @param {boolean} linked another node gives it
     */
    show(devices, linked) {
      const gpus = gpuList();
      const named = indices(devices);
      const all = !devices.trim();
      if (list.children.length !== gpus.length) list.replaceChildren(...gpus.map((gpu) => line(gpu, choose)));
      for (const box of boxes()) {
        box.checked = all || Boolean(named?.includes(Number(box.value)));
        box.disabled = !all && named?.length === 1 && box.checked; // one stays
      }
      list.hidden = linked || !gpus.length;
    },
  };
}

/**
 * Does the list say all that this text says?
 * @param {string} devices
 */
export function isListed(devices) {
  const known = gpuList().map(({ index }) => index);
  const named = indices(devices);
  if (!known.length || !named) return false;
  return new Set(named).size === named.length && named.every((index, place) => known.includes(index) && index >= (named[place - 1] ?? 0));
}

/**
 * The numbers in "0,1" or "cuda:0,cuda:1"; undefined where it names something else.
 * @param {string} devices
 */
function indices(devices) {
  const names = devices.split(",").map((name) => name.trim()).filter(Boolean);
  const numbers = names.map((name) => /^(?:(?!cpu)[a-z]+:)?(\d+)$/.exec(name)?.[1]);
  return numbers.includes(undefined) ? undefined : numbers.map(Number);
}

/**
 * @param {import("./status.js").Gpu} gpu
 * @param {() => void} choose
 */
function line(gpu, choose) {
  const box = element("input", { type: "checkbox", value: String(gpu.index), onchange: choose });
  return element("label.cp-gpu", {}, box, ...gpuParts(gpu));
}
