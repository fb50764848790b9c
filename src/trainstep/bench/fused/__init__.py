"""`trainstep bench fused`: operators of a decoder's step that are bound by memory, ours against others'.

`problems.py` says what each computes and on which tensors, `run.py` checks and times it.
"""
