"""Sentences of docs/*.md whose figures come from docs/results/.

`SUBJECT_findings.py`, `theory.py` and `tour.py` have what a page says of its own tables; `steps.py`, `kernels.py`,
`memory.py`, `attention.py` and `parallel.py` the answers of docs/course.md on that subject. A sentence that compares
asserts what it says, so that it cannot outlive its figures.
"""
