"""How the host and its ranks talk. Knows no ComfyUI and no model.

messages   every message there is; readings are what a rank says of itself beside its work
channel    the socket of one rank; stream is the same to another machine, behind a handshake
bundles    values with tensors in them, in shared memory
"""
