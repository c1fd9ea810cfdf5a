"""Tiny models with random weights: networks and VAEs of ComfyUI's own classes, their files, and what they are called
with."""
