"""One rank's process: serve, load, run ComfyUI's loop, report."""
