/** Our workflows in ComfyUI's list: by name, the demo first. ComfyUI has them as the file system happens to. */

import { api } from "../../scripts/api.js";

const PACK = decodeURIComponent(new URL(".", import.meta.url).pathname.split("/").at(-2) ?? "");

/** Before the list is fetched, which is when somebody opens it. */
export function sortTemplates() {
  const page = /** @type {any} */ (api);
  const fetched = page.getWorkflowTemplates.bind(page);
  page.getWorkflowTemplates = async () => {
    const all = await fetched();
    return all[PACK] ? { ...all, [PACK]: [...all[PACK]].sort() } : all;
  };
}
