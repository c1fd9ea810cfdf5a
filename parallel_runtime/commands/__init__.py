"""The commands of `python -m parallel_runtime`: demo, join, migrate, networks, report."""
