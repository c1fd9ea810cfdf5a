"""Context-parallel diffusion in a sidecar worker group.

specs, plan   what was asked for, and the words of a parallel plan: frozen values
wire          how two processes talk: messages, tensors, channels
networks      how ComfyUI's networks are cut: one plan each
host          the ComfyUI side: starts a worker group and talks to it
worker        the torchrun side: loads a network, makes it parallel, runs the denoising loop
mapped, gguf  a model by ComfyUI's own loaders, the same on both sides
for_diffusers context parallelism for scripts around diffusers' transformers, beside ComfyUI
demo          a small trained model, and the whole path without ComfyUI

This package imports comfy only in worker/comfy_loop, mapped and gguf, and always imports itself relatively: ComfyUI and
torchrun load it under different names. DESIGN.md has the decisions that would surprise a reader.
"""
