"""python -m parallel_runtime networks draft|check SUBJECT.py: see networks/README.md."""
