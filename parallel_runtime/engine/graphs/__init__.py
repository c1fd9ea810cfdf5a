"""Forwards recorded as CUDA graphs, and blocks compiled by torch.compile."""
