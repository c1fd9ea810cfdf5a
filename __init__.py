"""ComfyUI entry point. Nothing is imported until ComfyUI asks, so tools and tests can import this freely."""

WEB_DIRECTORY = "./web"
OLDEST = "0.15.0"  # the first whose MODEL says which loader made it


async def comfy_entrypoint():  # type: ignore[no-untyped-def]  # the type lives in ComfyUI
    """RuntimeError, which ComfyUI logs in one line, in one that lacks what we call."""
    from comfyui_version import __version__

    if _numbers(__version__) < _numbers(OLDEST):
        raise RuntimeError(f"CP Sampler needs ComfyUI {OLDEST} or newer, and this is {__version__}; update ComfyUI")
    try:
        from .nodes import ContextParallelExtension
    except ImportError as missing:
        raise RuntimeError(
            f"CP Sampler does not fit ComfyUI {__version__}: {missing}; update both (docs/devices.md)"
        ) from missing
    return ContextParallelExtension()


def _numbers(version: str) -> list[int]:
    return [int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:3]]
