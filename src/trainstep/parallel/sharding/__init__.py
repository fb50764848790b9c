"""The parts of fully sharded data parallel, in reading order.

`plan` says which parameters travel together; `parameter` holds one of them, cut by rows; `construct` cuts them, module
by module; `group` gathers and frees; `gradients` sends and adds up; `schedule` decides when; `boundary` is where a
module's call meets the schedule; `checkpoint` writes and reads; `streams` runs things beside the computation.
"""
