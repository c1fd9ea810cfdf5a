"""Lets ComfyUI's model detection accept widths that it hard-codes, for files whose metadata has `cp_tiny`, or that have
it as a tensor of bytes, where ComfyUI reads no metadata."""

from __future__ import annotations

import json
from typing import Any


def install_tiny_override(detection: Any) -> None:
    """`detection` is ComfyUI's module comfy.model_detection. `match` are values that its classes are chosen by, `final`
    those that the network is built with; where there is a `model`, that class of supported_models is the one."""
    detect, choose = detection.detect_unet_config, detection.model_config_from_unet
    choose_class = detection.model_config_from_unet_config

    def detect_unet_config(state_dict: dict[str, Any], key_prefix: str, metadata: dict[str, str] | None = None) -> Any:
        tiny = _tiny(metadata, state_dict)
        if "model" in tiny:
            return {"cp_model": tiny["model"], **tiny["final"]}
        config = detect(state_dict, key_prefix, metadata=metadata)
        if config is not None and tiny:
            config.update(tiny.get("final", {}))
            config.update(tiny.get("match", {}))  # what the matching of model classes looks at
        return config

    def model_config_from_unet(
        state_dict: dict[str, Any],
        unet_key_prefix: str,
        use_base_if_no_match: bool = False,
        metadata: dict[str, str] | None = None,
    ) -> Any:
        model_config = choose(state_dict, unet_key_prefix, use_base_if_no_match, metadata=metadata)
        if model_config is not None and (tiny := _tiny(metadata, state_dict)):
            model_config.unet_config.update(tiny.get("final", {}))
        return model_config

    def model_config_from_unet_config(unet_config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if name := unet_config.pop("cp_model", None):
            return getattr(detection.comfy.supported_models, name)(unet_config)
        return choose_class(unet_config, *args, **kwargs)

    detection.detect_unet_config, detection.model_config_from_unet = detect_unet_config, model_config_from_unet
    detection.model_config_from_unet_config = model_config_from_unet_config


def _tiny(metadata: dict[str, str] | None, state_dict: dict[str, Any]) -> dict[str, Any]:
    if "cp_tiny" in state_dict:
        return json.loads(bytes(state_dict["cp_tiny"].tolist()))
    return json.loads(metadata["cp_tiny"]) if metadata and "cp_tiny" in metadata else {}
