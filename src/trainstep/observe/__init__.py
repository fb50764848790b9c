"""Instruments that look into a process that trains, and change nothing about it: `trainstep run` and `trainstep.watch`
share them.

Hooks on torch (`hooks`, `modules`, `loaders`) tell a `StepFinder` (`steps`) what begins and ends; a `Session` writes
that to a log on disk (`session`, `log`) with the lines of code that it came from (`lines`), and has `instruments` look
into a few steps.
"""
