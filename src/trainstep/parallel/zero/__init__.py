"""An optimizer whose state and work are divided among the ranks (ZeRO stage 1; Rajbhandari et al. 2020, section 5.1).

The schedule of a step:

- Forward and backward are those of data parallel training: every rank holds all parameters, and gradients are averaged
  in buckets during backward. With `ddp` given they are reduce-scattered instead of all-reduced: each rank gets only the
  slice it needs, for half the bytes, and gathering the parameters then costs the other half. The whole step sends as
  much as plain data parallel training.
- In `step` a rank updates only its piece of every parameter, a slice or, of some, the whole, and so keeps optimizer
  state for that alone. The parameters are walked through in buckets of up to `exchange_mb`: the rank's pieces of a
  bucket are updated, and then the bucket is gathered in one call (what is whole is broadcast by its owner), on the
  group's own stream, while the next bucket is being updated. At the end the current stream waits for the last of them.
- With `overlap_gather` it does not: gathers go on beside the next forward, which waits for what it needs (`arrivals`).

`pieces` cuts parameters, exchanges them, and writes and reads their state; `arrivals` is where a forward waits for
them; `optimizer` is the optimizer.
"""
