"""Describes a MODEL, guider, sampler or VAE for the workers, or says why they cannot have it.

A description is plain values, tensors and names of files and of ComfyUI's code, from which a worker makes the same
object again. No code is sent."""
