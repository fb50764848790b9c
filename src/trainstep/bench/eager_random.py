"""Random numbers of eager code in compiled code, so that a model with dropout can be compared with its eager self."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainstep.bench.outcome import release_memory


@contextmanager
def eager_random() -> Iterator[None]:
    """Inside, what is compiled draws as eager code does, which is slower: for checks, not for times.

    Compiled code is kept by function, whatever the options it was compiled with. So what was compiled before is
    dropped on entry, and what was compiled inside on leaving.
    """
    from torch._inductor import config as inductor

    release_memory()
    try:
        with inductor.patch(fallback_random=True):
            yield
    finally:
        release_memory()
