"""How a network is split over ranks: hooks at its blocks, token streams, each rank's tokens, token patches."""
