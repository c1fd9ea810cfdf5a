"""Context-parallel diffusion in a sidecar worker group.

specs, jobs, errors  what was asked for, what one request brings, what goes wrong: frozen values
plan, networks       the words in which a network is cut, and how ComfyUI's networks are: one plan each
autoencoders         ComfyUI's VAEs that may be divided
wire                 how two processes talk: messages, tensors, channels
host                 the ComfyUI side: starts a worker group and talks to it
worker               the torchrun side: loads a network, makes it parallel, runs the denoising loop
mapped, gguf         a model by ComfyUI's own loaders, the same on both sides
blocks, witness, random_states
                     what both sides find out alike, of a network, of a VAE's weights and of torch
accelerators         kinds of devices, and what differs between them
for_diffusers        context parallelism for scripts around diffusers' transformers, beside ComfyUI
demo                 a small trained model, and the whole path without ComfyUI
report, migrate      commands: what a machine can do, and CP nodes for native ones in a saved workflow

This package imports comfy only in worker/comfy_loop, report, mapped and gguf, and always imports itself relatively:
ComfyUI and torchrun load it under different names. DESIGN.md walks one request through it, and has the decisions that
would surprise a reader.
"""
