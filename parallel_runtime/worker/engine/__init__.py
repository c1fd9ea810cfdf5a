"""Exact context-parallel attention for diffusers transformers, at any size. Knows no model family and no sampler.

attach      make a transformer parallel, and undo it
mesh        this rank's place in the world, and its groups
plan_of     a transformer's own diffusers `_cp_plan`, read as our Plan, or one of our plans where that is no use
sharding    where streams are cut and put back together; streams are their lengths, holdings a rank's part of them
attention   one attention over cut streams: ulysses and ring move data, kernels compute, masks follow the keys
backend     the one hook into diffusers; processors are ours where diffusers' own pass it by
exchange    the collectives
"""
