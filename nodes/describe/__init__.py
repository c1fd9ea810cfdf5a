"""Describes a MODEL, guider, sampler or VAE for the workers, or says why they cannot have it."""
