"""The ComfyUI side of a worker group."""
