"""Sentences of docs/*.md whose figures come from docs/results/, one file per subject.

A sentence that compares asserts what it says, so that it cannot outlive its figures.
"""
