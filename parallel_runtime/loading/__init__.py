"""What ComfyUI's process and a worker must do alike: read ComfyUI's files, fingerprint weights,
set random generators."""
