"""The device mesh, its collectives, and what a rank knows of its device."""
