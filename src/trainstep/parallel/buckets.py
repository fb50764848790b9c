"""Which tensors travel together: consecutive ones, up to a size, of one dtype and one way of being reduced."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

MB = 10**6
"""Bytes in a megabyte, as networks count them."""


def assign_buckets(items: Iterable[tuple[int, int, Hashable]], bucket_mb: float) -> list[list[int]]:
    """Cut a sequence into buckets.

    Args:
        items: (index, bytes, kind) in the order in which the tensors become ready. Each kind fills buckets of its own.
        bucket_mb: a bucket is closed as soon as it holds this much, so that small tensors travel with large ones. 0
            makes one bucket per tensor, infinity one per kind.

    Returns:
        The indices of each bucket, ordered by when its last tensor becomes ready.
    """
    limit = bucket_mb * MB
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: list[tuple[int, list[int]]] = []  # (position of the last tensor, indices)
    last: dict[Hashable, int] = {}
    for position, (index, size, kind) in enumerate(items):
        bucket, filled = open_buckets.pop(kind, ([], 0))
        bucket.append(index)
        if filled + size >= limit:
            closed.append((position, bucket))
        else:
            open_buckets[kind] = (bucket, filled + size)
        last[kind] = position
    closed += [(last[kind], bucket) for kind, (bucket, _) in open_buckets.items()]
    return [bucket for _, bucket in sorted(closed)]
