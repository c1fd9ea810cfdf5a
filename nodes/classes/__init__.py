"""The nodes that users drag: one file a node."""
