"""Data parallel training: the same parameters on every rank, each rank's own batch, gradients averaged.

Schedule. At the start, rank 0's parameters and buffers go to every rank. In backward, as soon as autograd has put
together the gradients of a bucket's parameters, the bucket is averaged over the ranks in one call, on the group's own
stream, while backward goes on with earlier layers. Before the optimizer step, `finish_gradient_synchronization` makes
the current stream wait for what is still under way: the last bucket or two.

Buckets are filled in the order in which gradients become ready: at first guessed as the reverse of definition, after
the first step as rank 0 saw it. They are started in that order on every rank, whatever order autograd has elsewhere,
since ranks that start different collectives wait for each other for ever.

A bucket is a list of gradients, not a buffer. Autograd hands over a gradient in memory of its own; it is averaged right
there, so that no gradient is copied, none takes memory twice, and `param.grad` may be kept, zeroed or dropped between
steps as in any training loop. See docs/parallel.md for the four classic schemes as settings of this one.

Between GPUs of one host gradients go by copies, which leave backward its multiprocessors (`transport` has why): each
rank gets its part of a bucket from all others, averages it, and the others take the means from there. A reduce-scatter
is that without its last part.

`wrapper` says what is sent when; `bucket` sends, by collectives or by `averages`; `scattered` is what stands in
`param.grad` where a rank has its slice alone.
"""
