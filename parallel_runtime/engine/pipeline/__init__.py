"""A network in pipeline stages over ranks, and PipeFusion's token patches that follow each other through them."""
