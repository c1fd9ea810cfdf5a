"""ComfyUI entry point. Nothing is imported until ComfyUI asks, so tools and tests can import this freely."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():  # type: ignore[no-untyped-def]  # the type lives in ComfyUI
    """RuntimeError, which ComfyUI logs in one line, in one that lacks what we call."""
    from comfyui_version import __version__

    from .parallel_runtime import OLDEST, numbers

    if numbers(__version__) < numbers(OLDEST):
        raise RuntimeError(f"CP Sampler needs ComfyUI {OLDEST} or newer, and this is {__version__}; update ComfyUI")
    try:
        from .nodes import ContextParallelExtension
    except ImportError as missing:
        words = f"CP Sampler does not fit ComfyUI {__version__}: {missing}; update both (docs/devices.md)"
        raise RuntimeError(words) from missing
    return ContextParallelExtension()
