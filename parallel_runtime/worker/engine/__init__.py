"""Exact context-parallel attention for ComfyUI's networks and diffusers' transformers, at any size. Knows no
model family and no sampler.

mesh        this rank's place in the world, and its groups
divide      make a network of ComfyUI's parallel, and undo it; overriding and naming take its attention, between is
            what others do between its blocks, framing has modules see whole frames, scales one maximum for all ranks
attach      make a transformer of diffusers' parallel, and undo it; diffusers_plans and diffusers_videos are its plans,
            backend the one hook into its attention, processors ours where diffusers' own pass that by
cuts        where streams are cut and put back together, as a plan says; streams are their lengths, sizes and holdings a
            rank's part of them, standins what it has of none; sites are a plan's names found in a network, hooking puts
            cuts there
attention   one attention over cut streams: arrangement is who holds what, ulysses and ring move data, kernels compute,
            merge puts blocks together, masks and pair_masks follow the keys
choosing    which kernel that is, the same on all ranks, by a race; operators are what there is, advising is for one
            worker
recording   when a network's forward is recorded and replayed; graphs records it, moments are a device's time
compiling   blocks compiled one by one; opaque is an attention in their graphs
exchange    the collectives
"""
