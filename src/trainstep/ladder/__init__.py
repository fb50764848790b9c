"""Changes, tried one by one and accepted where they make a step or a script faster.

`ladder` climbs with a runner: `steps` runs a workload's step in this process, `scripts` a script in processes of its
own. `change` is one change, and `changes/` has all of them.
"""
