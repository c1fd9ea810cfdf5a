"""Exact context-parallel attention for ComfyUI's networks and diffusers' transformers, at any size. Knows no
model family and no sampler.

attach      make a transformer of diffusers' parallel, and undo it; diffusers_plans are its plans
mesh        this rank's place in the world, and its groups
divide      make a network of ComfyUI's parallel, and undo it; overriding takes its attention, between what is done
            between its blocks
cuts        where streams are cut and put back together, as a plan says; streams are their lengths, holdings a
            rank's part of them; sites are a plan's names found in a network, hooking puts cuts there
attention   one attention over cut streams: ulysses and ring move data, kernels compute, masks follow the keys
choosing    which kernel that is, the same on all ranks, by a race; operators are what there is, advising is for one
            worker
backend     the one hook into diffusers' attention; processors are ours where diffusers' own pass it by
exchange    the collectives
"""
