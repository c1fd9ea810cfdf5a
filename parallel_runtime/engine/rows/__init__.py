"""A convolutional network's own forward, each rank computing some rows of the picture."""
