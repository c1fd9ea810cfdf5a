"""ComfyUI entry point. Nothing is imported until ComfyUI asks, so tools and tests can import this freely."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():  # type: ignore[no-untyped-def]  # the type lives in ComfyUI
    from .nodes import ContextParallelExtension

    return ContextParallelExtension()
