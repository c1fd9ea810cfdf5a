/** Pages of this pack's docs/, drawn as ComfyUI draws Markdown, in a dialog. Links to other pages open there too. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { element } from "./elements.js";
import { say } from "./words.js";

const PAGE = /^(?:\.\.\/\.\.\/docs\/|troubleshooting\/|\.\.\/)?([\w-]+)\.md(?:#.*)?$/; // as in web/docs/ and docs/

/** Links of the nodes' help pages, and of pages in the dialog, to pages of docs/ open the dialog. */
export function startHelp() {
  document.addEventListener("click", (event) => {
    const link = /** @type {Element | null} */ (event.target)?.closest?.("a[href]");
    const ours = link?.closest("dialog.cp-help") || link?.getAttribute("href")?.startsWith("../../docs/");
    const page = ours && link?.getAttribute("href")?.match(PAGE)?.[1];
    if (!page) return;
    event.preventDefault();
    event.stopPropagation();
    void openHelp(page);
  }, true);
}

/** @param {string} page of docs/ or docs/troubleshooting */
export async function openHelp(page) {
  const answer = await api.fetchApi(`/cp/help/${page}`);
  const text = element("div.cp-help-text.comfy-markdown-content");
  const dialog = element("dialog.cp-help", { "aria-label": say("toast.help"), onclose: () => dialog.remove() },
    element("button.cp-button.cp-help-close", { type: "button", onclick: () => dialog.close() }, say("close")), text);
  text.innerHTML = /** @type {any} */ (app.extensionManager).renderMarkdownToHtml(await answer.text());
  for (const other of document.querySelectorAll("dialog.cp-help")) other.remove();
  document.body.append(dialog);
  dialog.showModal();
}
