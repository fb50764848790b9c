"""Sweeps: any command that measures, once per combination of a file's values, each in a process of its own.

`grid_file` reads what to run, `case` is one cell and its folder, `rows` reads what its process wrote
and leaves out what was finished before; `processes` and `jobs` run many, on this machine or through submitit. Nothing
here imports torch: only the cases' processes do.
"""
