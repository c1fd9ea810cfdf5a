"""The commands of `python -m parallel_runtime`: demo, join, migrate, packs, report."""
