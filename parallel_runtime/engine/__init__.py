"""Exact parallel forwards of any torch network. Imports no ComfyUI, and knows no sampler and no user of it."""
