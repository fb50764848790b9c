"""Random numbers of eager code in compiled code, so that a model with dropout can be compared with its eager self."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainstep.bench.outcome import compiled_anew


@contextmanager
def eager_random() -> Iterator[None]:
    """Inside, what is compiled (anew) draws as eager code does, which is slower: for checks, not for times."""
    from torch._inductor import config as inductor

    with compiled_anew(), inductor.patch(fallback_random=True):
        yield
