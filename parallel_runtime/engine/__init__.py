"""Exact parallel forwards of any torch network. Knows no ComfyUI, no sampler and no user of it."""
