"""How two processes talk: messages, bundles of tensors, sockets."""
