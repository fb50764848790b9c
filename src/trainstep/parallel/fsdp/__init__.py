"""Fully sharded data parallel (ZeRO-3, Rajbhandari et al. 2020): every rank keeps its rows of every matrix.

The schedule of a step, for a model of blocks b0 … bn:

- At rest a rank has its shard of every parameter with two or more dimensions, in the dtype it is trained in, the
  shard's gradient and the optimizer's state for it. Parameters with fewer dimensions are replicated.
- Forward. When block i is called, its gather has been under way since block i-2 was called. On a side stream the rank's
  own rows are cast to `compute_dtype` into their place in the full parameters, and one all-gather fills in the rest.
  The call waits for that, starts the gather of block i+2, and computes. Afterwards the full parameters are freed; those
  of the last blocks are kept, because backward begins with them.
- Backward runs the same in reverse: when it reaches block i's outputs, blocks i-1 and i-2 are gathered. Gradients wait
  where autograd left them if copies will carry them, and in a buffer of their block otherwise. When backward has left
  the block, its full parameters are freed and its gradients are sent, beside the backward of block i-1, and this rank's
  rows of the mean arrive in the shards' `.grad`. Where it is not seen leaving, as of a block whose inputs need no
  gradient, both happen at the end of backward.
- `finish_gradient_synchronization` averages the replicated parameters' gradients in one flat call, and waits.

On a GPU nothing of this makes the host wait.

With replicas (hybrid sharding; a mesh of two dimensions, see `trainstep.parallel.ranks`) all of this is done by the
ranks of one replica, a row of the mesh, and the mean over them is then averaged between replicas, as shards: when a
block's rows have arrived they are averaged, on a third stream, while the next block's gradients are sent within the
row. So two blocks' gradients are on their way at a time, one within replicas and one between them, behind the backward
of a third. Where all replicas are on one host and copies can be made, they carry a block's gradients among all ranks in
one step instead. What is not sharded is averaged over all ranks in the one flat call; weights are gathered within
replicas alone.

In reading order: `shards` decides what is gathered together and cuts it; `group` gathers and frees; `gradients` are
sent and added up; `carriers` chooses what of `parallel.transport` carries both; `calls` are noted, and `schedule`
decides when; `boundary` meets the modules' calls, `leavings` what they leave, and `written` what they write;
`placeholder` stands in modules for what is not gathered, and outside for shards; `rows` decides what computes with
those; `agreement` holds the ranks together; `wrapper` puts them around a module, with its `checks`; `checkpoint` writes
and reads.
"""
