"""Where a model's weights are, and how a block's weights reach the device just before it runs."""
