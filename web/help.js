/** The pages on what to do about a failure, as ComfyUI's server has them. */

import { api } from "../../scripts/api.js";

/** @param {string} page of docs/troubleshooting */
export function openHelp(page) {
  window.open(api.apiURL(`/cp/help/${page}`), "_blank", "noopener");
}
