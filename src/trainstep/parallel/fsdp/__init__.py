"""Fully sharded data parallel (ZeRO-3, Rajbhandari et al. 2020): every rank keeps its rows of every matrix.

The schedule of a step, for a model of blocks b0 … bn:

- At rest a rank has its shard of every parameter with two or more dimensions, in the dtype it is trained in, the
  shard's gradient and the optimizer's state for it. Parameters with fewer dimensions are replicated.
- Forward. Calls are expected in the order of the pass before. In a first pass each block is gathered when it is called.
  Later, when block i is called, its gather has been under way since block i-2 was called. On a side stream the rank's
  own rows are cast to `compute_dtype` into their place in the full parameters, and one all-gather fills in the rest.
  The call starts the gather of block i+2, waits for its own, and computes. Afterwards the full parameters are freed.
  Those of the last blocks are kept, because backward begins with them.
- Backward runs the same in reverse: when it reaches block i's outputs, blocks i-1 and i-2 are gathered. Gradients wait
  where autograd left them if copies will carry them, and in a buffer of their block otherwise. When backward has left
  the block, its full parameters are freed and its gradients are sent, beside the backward of block i-1, and this rank's
  rows of the mean arrive in the shards' `.grad`. Where it is not seen leaving, as of a block whose inputs need no
  gradient, both happen when backward reaches an earlier call, or at its end.
- `finish_gradient_synchronization` averages the replicated parameters' gradients in one flat call, and waits.

On a GPU the host waits in two places only: over NCCL, where ranks compare what they did in the pass before, and at the
end of a step where some rank left a replicated parameter unused.

With replicas (hybrid sharding; a mesh of two dimensions, see `trainstep.parallel.ranks`) all of this is done by the
ranks of one replica, a row of the mesh, and the mean over them is then averaged between replicas, as shards: when a
block's rows have arrived they are averaged, on a third stream, while the next block's gradients are sent within the
row. So two blocks' gradients are on their way at a time, one within replicas and one between them, behind the backward
of a third. What is not sharded is averaged over all ranks in the one flat call; weights are gathered within
replicas alone.

Forward and backward are in fourteen files. `wrapper` puts a schedule around a module: `shards` decides which parameters
are gathered together and cuts them, `group` gathers and frees, `gradients` are sent and added up, and `schedule`
decides when and holds the ranks together. `parallel.units` replaces the class of a module, so that each call goes
through `boundary`, which finds the tensors that enter and leave it. `placeholder` stands in modules for parameters that
are not gathered, and outside for shards; `rows` decides which operators compute with those. A slice reaches a rank in
one of two ways: `transport.by_collectives`, over `parallel.collectives`, or `transport.by_copies`, through
`transport.peer_memory`; `by_copies.choose_transport` takes the second between GPUs of one host. Both run on a
`parallel.side_stream`. Beside the step, `checks` look at arguments, and `checkpoint`, with `extra_state`, writes and
reads.
"""
