"""A VAE's own, unchanged forward over ranks, each of which holds some rows (or columns) of the picture.

Knows torch and the engine's exchanges, neither ComfyUI nor any VAE.
"""
