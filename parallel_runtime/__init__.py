"""Context-parallel diffusion in a sidecar worker group.

specs, plan   what was asked for, and the words of a parallel plan: frozen values
wire          how two processes talk: messages, tensors, channels
families      what differs between models: one file each
host          the ComfyUI side: starts a worker group and talks to it
worker        the torchrun side: loads a transformer, makes it parallel, runs the denoising loop
demo          a small trained model, and the whole path without ComfyUI

This package imports comfy only in worker/comfy_loop and stand_in.py, and always imports itself relatively: ComfyUI and
torchrun load it under different names. DESIGN.md has the decisions that would surprise a reader.
"""
