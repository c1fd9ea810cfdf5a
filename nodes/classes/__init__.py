"""The nodes that users drag: one file a kind of node."""
