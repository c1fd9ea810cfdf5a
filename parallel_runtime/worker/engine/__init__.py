"""Exact context-parallel attention for networks of any size. Needs PyTorch alone; knows no model family, no sampler and
not who uses it: the workers for ComfyUI's networks, ../../for_diffusers for diffusers' transformers.

mesh        this rank's place in the world, and its groups
divide      make a network of ComfyUI's parallel, and undo it; overriding takes its attention, between what is done
            between its blocks
cuts        where streams are cut and put back together, as a plan says; streams are their lengths, holdings a
            rank's part of them; sites are a plan's names found in a network, hooking puts cuts there
attention   one attention over cut streams: ulysses and ring move data, kernels compute, masks follow the keys
choosing    which kernel that is, the same on all ranks, by a race; operators are what there is, advising is for one
            worker
exchange    the collectives
"""
