"""Where a model's weights are at rest, and how a block's come to the device just before it runs. Knows no format and no
network: bytes go in, and the same tensors come out."""
