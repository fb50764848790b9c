"""Measure tile configurations on this GPU and write the table that `tuning` looks them up in.

`tune` is for whoever has a GPU that the table does not know, or a new Triton: it times every candidate of every
kernel on inputs large enough to fill the GPU and keeps the fastest. What does not fit its registers is passed over
unless all others take a tenth longer: how much spills, and so the time, changes with the compiler's version.
Compiling takes far longer than timing, so the candidates of a case are compiled ahead by as many processes as there
are processors, into Triton's cache.
"""

import importlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing
from torch import Tensor

from trainstep.attention.triton import tables
from trainstep.attention.triton.dispatch import runs_hopper_kernels
from trainstep.attention.triton.tuning import HopperTile, Tile, architecture, block_of
from trainstep.casting import DTYPES, matmul_precision
from trainstep.errors import UsageError
from trainstep.precision import PrecisionName

KERNELS = ("forward", "dq", "dkdv")
HEAD_DIMS = (16, 32, 64, 128, 256)
TABLES = Path(tables.__file__)

AnyTile = Tile | HopperTile

# Of float32: rows a program keeps, rows that stream past them, warps. On Hopper four warps multiply 64 rows; given to
# eight, a tile is cut into products of half the columns, and those of eight columns read beyond it (lab log).
_FLOAT32 = ((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8))
_WIDE_FLOAT32 = (
    (16, 32, 4), (32, 32, 4), (32, 32, 8), (32, 64, 8), (64, 16, 4), (64, 32, 4), (64, 64, 4), (128, 32, 8),
)  # from head_dim 128 on  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """One candidate on one case: its median time, or why it has none."""

    kernel: str
    dtype: PrecisionName
    head_dim: int
    is_causal: bool
    tile: AnyTile
    time_ms: float | None
    spills: int | None = None
    """Registers that the compiler keeps in local memory, as it counts them."""
    error: str = ""


def tune(
    *,
    head_dims: Iterable[int] = HEAD_DIMS,
    dtypes: Iterable[PrecisionName] = ("bf16", "fp32", "tf32"),
    kernels: Iterable[str] = KERNELS,
    seq: int = 8192,
    rep_ms: int = 60,
    progress: Callable[[Measurement], None] = lambda _: None,
    write: Path | None = TABLES,
) -> list[Measurement]:
    """Time every candidate on this GPU at batch · heads · head_dim = 2048 and length `seq`; return all measurements.

    float32 comes twice: as it is multiplied under torch's matmul precision "highest" (fp32) and under "high" (tf32).
    `progress` is called after each measurement. The fastest tile of each case replaces its row in `write` (not written
    where None) when the case is done.

    Raises:
        UsageError: there is no GPU.
        RuntimeError: a candidate left the GPU in an error that this process cannot leave; the message names it.
    """
    if not torch.cuda.is_available():
        raise UsageError("tuning measures on a GPU, and torch finds none")
    results: list[Measurement] = []
    kernels = tuple(kernels)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for head_dim, dtype, is_causal in itertools.product(head_dims, dtypes, (False, True)):
            with matmul_precision(dtype):
                case = _Case.make(head_dim, dtype, is_causal, seq)
                trials = [
                    (kernel, tile)
                    for kernel in kernels
                    for tile in candidates(kernel, case.hopper, DTYPES[dtype], head_dim)
                ]
                _compile_ahead(pool, head_dim, dtype, is_causal, trials)
                for kernel, tile in trials:
                    results.append(case.measure(kernel, tile, rep_ms))
                    progress(results[-1])
                    _check_gpu(results[-1])
            if write is not None:
                write_tables(*_updated(results), write)
    return results


def candidates(kernel: str, hopper: bool, dtype: torch.dtype, head_dim: int) -> Iterator[AnyTile]:
    """The configurations worth timing; those that do not fit the GPU fail when measured and drop out."""
    if hopper:
        blocks = {"forward": (64, 128), "dq": (32, 64, 128), "dkdv": (32, 64)}[kernel]
        first_stages = 3 if kernel == "dq" else 2  # dq frees a slot only after it has seen the next but one filled
        for consumers, block, stages, own in itertools.product((2, 3), blocks, range(first_stages, 5), (False, True)):
            yield HopperTile(consumers, block, stages, own)
        return
    if dtype == torch.float32:
        for (kept, streamed, warps), stages in itertools.product(_FLOAT32 if head_dim <= 64 else _WIDE_FLOAT32, (1, 2)):
            yield Tile(*((streamed, kept) if kernel == "dkdv" else (kept, streamed)), warps, stages)
        return
    sides = (32, 64, 128)
    for queries, keys, warps, stages in itertools.product(sides, sides, (4, 8), (1, 2, 3)):
        yield Tile(queries, keys, warps, stages)


def write_tables(portable: dict[str, Any], hopper: dict[Any, Any], path: Path) -> None:
    """Write the two tables as the Python module that `tuning` imports."""
    lines = [
        '"""Tile configurations, written by `trainstep.attention.triton.tune`: do not edit by hand.',
        "",
        "PORTABLE: architecture → (kernel, precision, head_dim block, causal) → (queries, keys, warps, stages).",
        "HOPPER: (kernel, head_dim block, causal) → (consumers, block, stages, own rows in registers).",
        '"""',
        "",
        "PORTABLE: dict[str, dict[tuple[str, str, int, bool], tuple[int, int, int, int]]] = {",
    ]
    for arch, rows in portable.items():
        lines.append(f'    "{arch}": {{')
        lines += [f'        ("{k}", "{p}", {d}, {c}): {tile},' for (k, p, d, c), tile in rows.items()]
        lines.append("    },")
    lines += ["}", "", "HOPPER: dict[tuple[str, int, bool], tuple[int, int, int, bool]] = {"]
    lines += [f'    ("{k}", {d}, {c}): {tile},' for (k, d, c), tile in hopper.items()]
    lines.append("}")
    path.write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class _Case:
    """Inputs of one head_dim, dtype and masking, with what each kernel needs from the one before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dtype: PrecisionName
    is_causal: bool
    hopper: bool

    @classmethod
    def make(cls, head_dim: int, dtype: PrecisionName, is_causal: bool, seq: int) -> "_Case":
        shape = (1, max(1, 2048 // head_dim), seq, head_dim)
        q, k, v, do = (torch.randn(shape, device="cuda", dtype=DTYPES[dtype]) for _ in range(4))
        return cls(q, k, v, do, dtype, is_causal, runs_hopper_kernels(q))

    def measure(self, kernel: str, tile: AnyTile, rep_ms: int) -> Measurement:
        about = (kernel, self.dtype, self.q.shape[-1], self.is_causal, tile)
        try:
            time = triton.testing.do_bench(self.call(kernel, tile), warmup=20, rep=rep_ms, return_mode="median")
        except Exception as error:
            return Measurement(*about, None, error=f"{type(error).__name__}: {str(error)[:200]}")
        return Measurement(*about, time, self._module(kernel).launcher.latest.n_spills)

    def call(self, kernel: str, tile: AnyTile) -> Callable[[], object]:
        """A function without arguments that runs `kernel` once with `tile`."""
        q, k, v, do, is_causal = self.q, self.k, self.v, self.do, self.is_causal
        out, scale = torch.empty_like(q), q.shape[-1] ** -0.5
        # Any plausible values time alike: a log-sum-exp near log(seq), and delta 0.
        lse, delta = torch.full(q.shape[:-1], 9.0, device=q.device), torch.zeros(q.shape[:-1], device=q.device)
        forward, dq, dkdv = (self._module(name) for name in KERNELS)
        if not self.hopper:
            return {
                "forward": lambda: forward.launch_forward(q, k, v, out, lse, is_causal, scale, tile),
                "dq": lambda: dq.launch_dq(q, k, v, q, lse, do, out, is_causal, scale, tile),
                "dkdv": lambda: dkdv.launch_dkdv(q, k, v, lse, delta, do, out, out, is_causal, scale, tile),
            }[kernel]
        stat = torch.stack([-lse / scale, delta]).flatten(1, 2)
        return {
            "forward": lambda: forward.launch_forward(q, k, v, out, lse, is_causal, scale, tile),
            "dq": lambda: dq.launch_dq(q, k, v, q, lse, do, out, is_causal, scale, tile),
            "dkdv": lambda: dkdv.launch_dkdv(q, k, v, stat, do, out, out, is_causal, scale, tile),
        }[kernel]

    def _module(self, kernel: str) -> Any:
        """The module of a kernel's launch function and launcher."""
        package = "trainstep.attention.triton.hopper" if self.hopper else "trainstep.attention.triton"
        return importlib.import_module(f"{package}.{kernel}")


def _merit(result: Measurement) -> float:
    """The lower the better, in milliseconds: the time, counted a tenth longer where registers spill."""
    assert result.time_ms is not None
    return result.time_ms * (1.1 if result.spills else 1.0)


def _check_gpu(latest: Measurement) -> None:
    """After an illegal access every later call of the process fails, and would look like an unfit candidate."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        tile = f"{latest.kernel} {latest.dtype} head_dim {latest.head_dim} {latest.tile}"
        raise RuntimeError(f"{tile} broke the GPU's context; take it out of `candidates` and tune again") from error


def _compile_ahead(
    pool: ProcessPoolExecutor, head_dim: int, dtype: PrecisionName, is_causal: bool, trials: list[tuple[str, AnyTile]]
) -> None:
    jobs = [(head_dim, dtype, is_causal, kernel, tile) for kernel, tile in trials]
    try:
        list(pool.map(_compile, jobs, chunksize=max(1, len(jobs) // (4 * (os.cpu_count() or 1)))))
    except BrokenProcessPool:
        return  # a candidate took its process along: what is not compiled yet is when it is measured


def _compile(job: tuple[int, PrecisionName, bool, str, AnyTile]) -> None:
    """Run one candidate on a few tokens: the compiled kernel is the same, and stays in Triton's cache on disk."""
    head_dim, dtype, is_causal, kernel, tile = job
    try:
        with matmul_precision(dtype):
            _Case.make(head_dim, dtype, is_causal, seq=256).call(kernel, tile)()
    except Exception:
        return  # it fails again, and is reported, when it is measured


def _updated(results: list[Measurement]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """The tables as they are, with the fastest measured tile of each case put in."""
    portable = {arch: dict(rows) for arch, rows in tables.PORTABLE.items()}
    hopper: dict[Any, Any] = dict(tables.HOPPER)
    arch = architecture(torch.cuda.get_device_capability())
    timed = [result for result in results if result.time_ms is not None]
    for best in sorted(timed, key=_merit, reverse=True):  # the best of a case is written last
        if isinstance(best.tile, HopperTile):
            hopper[best.kernel, max(64, block_of(best.head_dim)), best.is_causal] = astuple(best.tile)
        else:
            precision = {"fp32": "tf32x3", "tf32": "tf32"}.get(best.dtype, "16-bit")
            portable[arch][best.kernel, precision, block_of(best.head_dim), best.is_causal] = astuple(best.tile)
    return portable, hopper
