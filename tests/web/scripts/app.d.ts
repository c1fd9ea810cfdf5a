/** What ComfyUI serves beside every extension, by the frontend's published types. */
import type { ComfyApp } from "@comfyorg/comfyui-frontend-types";

export const app: ComfyApp;

declare global {
  const LiteGraph: any;
}
