"""Runs, evaluations and decodes on the workers, and the workers' memory as ComfyUI counts it."""
