/** What ComfyUI serves beside every extension, by the frontend's published types. */
import type { ComfyApi } from "@comfyorg/comfyui-frontend-types";

export const api: ComfyApi;
