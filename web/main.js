/** CP Sampler's part of ComfyUI's page. What it does is in the modules; here they are hung in. */

import { app } from "../../scripts/app.js";
import { badge, startBadge } from "./badge.js";
import { startNotices } from "./notices.js";
import { panel } from "./panel.js";
import { startFollowing } from "./status.js";
import { loadWords } from "./words.js";

app.registerExtension({
  name: "ContextParallel.Sampler",
  get actionBarButtons() {
    return badge();
  },
  async setup() {
    addStyle();
    await loadWords();
    app.extensionManager.registerSidebarTab(panel());
    startBadge();
    startNotices();
    await startFollowing();
  },
});

function addStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./style.css", import.meta.url).href;
  document.head.append(link);
}
