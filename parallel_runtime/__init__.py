"""Context-parallel diffusion in a group of worker processes: docs/architecture.md draws its rooms.

This package always imports itself relatively: ComfyUI and torchrun load it under different names.
"""
