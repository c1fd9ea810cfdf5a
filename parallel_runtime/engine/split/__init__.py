"""A network split over ranks: hooks at its blocks, token streams, and the tokens that each rank has."""
