"""Transport of shards, slices and gradients: collectives, or copies between the memories of a host.

A collective is a kernel: while it runs, its thread blocks take multiprocessors and memory bandwidth from the
computation beside it, or wait until the computation leaves them some. Copies between GPUs of one host are done by copy
engines instead. On two H200s a matrix product slows down by 14 % beside copies and by 45 % beside the same bytes in a
collective, and the copies are twice as fast beside it (notebook/lab-log.md). Copies need all ranks on one host, and a
staging buffer there, as large as the largest gather, exchange or average needs, up to `OUTBOX_BYTES` and `INBOX_BYTES`:
the embedding of a large vocabulary is several times a block, and nothing else can use the buffer. What does not fit
goes in several rounds.

`by_collectives` has the types of every transport, and does it by NCCL or Gloo. `by_copies` does it by copies through
`peer_memory`, many in one call of the driver, and chooses between the two.
"""
