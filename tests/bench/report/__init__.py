"""python -m tests.bench.report: measures kernels, networks, graphs and the group part by part, in processes of its own.

__main__.py is the command. Each part is a module with `cases`: part.py runs one in processes of its own, measuring.py
makes its cases measurements, and the product's report writes these down. Parts that assert are in tests/gpu.
"""
