"""python -m parallel_runtime report: measures what a machine can do, in processes of its own, one measurement after
another.

Nothing else needs this package. command.py is the command. Each part of the report is a module with `cases`: part.py
runs one in processes of its own, measuring.py makes its cases measurements, and page.py writes these down.
"""
