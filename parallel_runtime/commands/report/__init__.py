"""python -m parallel_runtime report: what this machine has, and how fast and exact the workers are on it.

command.py is the command, flux_steps.py measures, page.py writes rows down, and workflow.py summarises a workflow. What
times single kernels and networks is `python -m tests.bench.report`.
"""
