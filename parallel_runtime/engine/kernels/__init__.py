"""Attention kernels of one device: which there are, how one is called, which is chosen."""
