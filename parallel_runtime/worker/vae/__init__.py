"""Runs ComfyUI's VAEs; each rank computes its rows of the picture."""
