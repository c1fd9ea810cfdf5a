"""A test-only pack that can be imported in ComfyUI's process alone: in a worker it raises, or as `cp_fatal` ends it."""

from __future__ import annotations

import json
import os
from typing import Any

NAME = os.path.basename(os.path.dirname(__file__))

if "RANK" in os.environ:  # of a worker
    if NAME == "cp_fatal":
        os._exit(7)
    raise RuntimeError("only in ComfyUI")


def _darker(args: dict[str, Any]) -> Any:
    return args["denoised"] * 0.9


class Unimportable:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "patch", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        patched = model.clone()
        patched.set_model_sampler_post_cfg_function(_darker)
        return (patched,)


class UnimportableLoader:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "load", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"name": ("STRING", {})}}

    def load(self, name: str) -> tuple[Any]:
        import comfy.sd
        import comfy.utils
        import folder_paths

        path = folder_paths.get_full_path_or_raise("diffusion_models", name)
        return (comfy.sd.load_diffusion_model_state_dict(comfy.utils.load_torch_file(path)),)


class UnimportableClip:
    RETURN_TYPES, FUNCTION, CATEGORY = ("CLIP",), "load", "cp test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"name": ("STRING", {}), "options": ("STRING", {})}}

    def load(self, name: str, options: str) -> tuple[Any]:
        import comfy.sd
        import comfy.utils
        import folder_paths

        state = comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("text_encoders", name))
        return (comfy.sd.load_text_encoder_state_dicts([state], model_options=json.loads(options)),)


NODE_CLASS_MAPPINGS = {
    f"CPTest {NAME}": Unimportable,
    f"CPTest {NAME} loader": UnimportableLoader,
    f"CPTest {NAME} clip": UnimportableClip,
}
