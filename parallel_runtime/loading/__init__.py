"""What both processes do alike: read ComfyUI's files, fingerprint weights, set random generators."""
