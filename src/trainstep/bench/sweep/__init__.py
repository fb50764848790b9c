"""Sweeps: any command that measures, once per combination of a file's values, each in a process of its own.

`grid_file` reads what to run, `case` is one cell and what is kept of it, `child` is its process and `outcome` what came
of it; `here` and `jobs` run many, on this machine or through submitit; `resume` leaves out what was finished before.
Nothing here imports torch: only the cases' processes do.
"""
