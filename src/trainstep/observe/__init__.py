"""What looks into a process that trains, and changes nothing about it: `trainstep run` and `trainstep.watch` share it.

Hooks on torch (`hooks`, `modules`, `loaders`) tell a `StepFinder` (`steps`) what begins and ends; a `Session` writes
that to a log on disk (`session`, `log`) with the lines of code that it came from (`lines`), and has `instruments` look
into a few steps.
"""
