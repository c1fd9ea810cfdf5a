"""Exact context-parallel attention for networks of any size. Needs PyTorch alone; knows no model family, no sampler and
not who uses it: the workers for ComfyUI's networks, ../../for_diffusers for diffusers' transformers.

mesh        this rank's place in the world, its groups, and what it learns as long as they live
divide      make a network of ComfyUI's parallel, and undo it; overriding and naming take its attention, scales is one
            maximum for all ranks
cuts        where streams are cut and put back together, as a plan says; streams are their lengths, and who holds which
            of their tokens; hooking puts cuts at a plan's blocks
attention   one attention over cut streams: ulysses and ring move data, kernels compute, merge puts blocks together,
            masks follow the keys
choosing    which kernel that is, the same on all ranks, by a race; operators are what there is
memory      what is free and spare for the next tensors
recording   when a network's forward is recorded and replayed; graphs records it, moments are a device's time
compiling   blocks compiled one by one; opaque is an attention in their graphs
exchange    the collectives
"""
