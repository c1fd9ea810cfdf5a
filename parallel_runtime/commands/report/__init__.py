"""python -m parallel_runtime report: measures what a machine can do, in processes of its own, one measurement after
another.

Nothing else needs this package. Each part of the report is a module with `cases`; part.py starts and runs one, page.py
writes down what it tells, command.py says what is left.
"""
