"""Measure which implementation is fastest on this GPU, and write the table from which `choose` answers."""

import itertools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from trainstep.attention import choice_table
from trainstep.attention.api import attention
from trainstep.errors import UsageError

CANDIDATES = ("flash-triton", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
LENGTHS = (512, 1024, 2048, 4096, 8192)
TABLE = Path(choice_table.__file__)


def measure(
    *,
    head_dims: Iterable[int] = (64, 128, 256),
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
    lengths: Iterable[int] = LENGTHS,
    rep_ms: int = 30,
    progress: Callable[[str], None] = lambda _: None,
    write: Path | None = TABLE,
) -> dict[tuple[str, str, int, bool], tuple[tuple[int, str], ...]]:
    """Time forward + backward of every candidate at 16,384 tokens and width 2048; return the table with the fastest.

    It is written (unless `write` is None) after each dtype, head_dim and masking. FlexAttention is left out, since it
    compiles anew for every shape. Raises UsageError without a GPU.
    """
    if not torch.cuda.is_available():
        raise UsageError("choosing an implementation takes measurements on a GPU, and torch finds none")
    major, minor = torch.cuda.get_device_capability()
    table = dict(choice_table.FASTEST)
    lengths = sorted(lengths)
    for head_dim, dtype, is_causal in itertools.product(head_dims, dtypes, (False, True)):
        rows: list[tuple[int, str]] = []
        for length in lengths:
            shape = (max(1, 16384 // length), max(1, 2048 // head_dim), length, head_dim)
            times = {impl: _time_ms(impl, shape, dtype, is_causal, rep_ms) for impl in CANDIDATES}
            name, time = min(times.items(), key=lambda item: item[1])
            progress(f"{shape} {dtype} causal={is_causal}: {name} {time:.3f} ms of {times}")
            if not rows or rows[-1][1] != name:
                rows.append((length if rows else 0, name))
        table[f"sm_{major}{minor}", str(dtype).removeprefix("torch."), head_dim, is_causal] = tuple(rows)
        if write is not None:
            write_table(table, write)
    return table


def write_table(table: dict[tuple[str, str, int, bool], tuple[tuple[int, str], ...]], path: Path) -> None:
    """Write the table as the Python module that `choice` imports."""
    head = path.read_text().split("FASTEST")[0]
    rows = "".join(f"    {key!r}: {value!r},\n".replace("'", '"') for key, value in table.items())
    annotation = "dict[tuple[str, str, int, bool], tuple[tuple[int, str], ...]]"
    path.write_text(f"{head}FASTEST: {annotation} = {{\n{rows}}}\n")


def _time_ms(impl: str, shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool, rep_ms: int) -> float:
    """Median time of forward + backward; infinity where `impl` cannot run these inputs."""
    import triton.testing

    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    do = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, is_causal=is_causal, impl=impl), (q, k, v), do)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of every reason why a backend cannot run
        try:
            return float(triton.testing.do_bench(step, warmup=10, rep=rep_ms, return_mode="median"))
        except UsageError:
            return float("inf")
