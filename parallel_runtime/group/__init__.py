"""The worker group of this process: start it, ask it, wait for it, watch it, end it. Imports no ComfyUI."""
