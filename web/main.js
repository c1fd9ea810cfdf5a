/** CP Sampler's part of ComfyUI's page. What it does is in the modules; here they are hung in. */

import { app } from "../../scripts/app.js";
import { badge, startBadge } from "./badge.js";
import { addSummary } from "./config.js";
import { followRenderer } from "./fold.js";
import { CONFIG } from "./graph.js";
import { canvasItems, menuItems, migrateCommands, toolboxCommands } from "./migrate.js";
import { startHelp } from "./help.js";
import { startNotices } from "./notices.js";
import { addLine, startLines } from "./onnode.js";
import { openPanel, panel } from "./panel.js";
import { addPlan, PLAN } from "./plan.js";
import { startRefusals } from "./refusals.js";
import { startPrompts } from "./prompts.js";
import { settings } from "./settings.js";
import { startFollowing } from "./status.js";
import { sortTemplates } from "./templates.js";
import { loadWords, say } from "./words.js";

const MENU = ["OpenPanel", "Migrate", "MigrateAll", "MigrateBack", "MigrateAllBack"].map((name) => `CPSampler.${name}`);

await loadWords();
sortTemplates();

app.registerExtension({
  name: "ContextParallel.Sampler",
  settings: settings(),
  commands: [
    ...migrateCommands(),
    { id: "CPSampler.OpenPanel", label: say("title"), icon: "icon-[lucide--cpu]", function: openPanel },
  ],
  menuCommands: [{ path: ["Extensions", "CP Sampler"], commands: MENU }],
  get actionBarButtons() {
    return badge();
  },
  getNodeMenuItems: menuItems,
  getCanvasMenuItems: canvasItems,
  getSelectionToolboxCommands: toolboxCommands,
  nodeCreated(/** @type {any} */ node) {
    if (node.comfyClass === CONFIG) addSummary(node);
    if (node.comfyClass === PLAN) addPlan(node);
    addLine(node);
  },
  async setup() {
    addStyle();
    app.extensionManager.registerSidebarTab(panel());
    startBadge();
    startHelp();
    startNotices();
    startPrompts();
    startRefusals();
    startLines();
    followRenderer();
    await startFollowing();
  },
});

function addStyle() {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL("./style.css", import.meta.url).href;
  document.head.append(link);
}
