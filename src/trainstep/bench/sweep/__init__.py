"""Sweeps: any command that measures, once per combination of a file's values, each in a process of its own.

`cases` reads what to run; a case is one cell, and has a folder. `run` runs many on this machine.
`rows` reads what a case's process wrote, and leaves out what was finished before. Nothing here imports torch: only the
cases' processes do.
"""
