"""`trainstep tune attention`: measure this GPU and put what is fastest into the user's tables (see `tuned`).

For GPUs without entries in the tables, or a new version of Triton. A tile that spills registers is kept only if all
others take a tenth longer: how much spills, and so the time, changes with the compiler's version. Compiling takes far
longer than timing, so the candidates of a case are compiled ahead by as many processes as there are processors, into
Triton's cache.
"""

import itertools
import math
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import triton
import triton.testing
from torch import Tensor

from trainstep.attention import tuned
from trainstep.attention.api import attention
from trainstep.attention.flash import runs_hopper_kernels
from trainstep.attention.hopper import dq as hopper_dq
from trainstep.attention.hopper import forward as hopper_forward
from trainstep.attention.hopper.dkdv import launch_dkdv as launch_hopper_dkdv
from trainstep.attention.triton import backward, forward
from trainstep.attention.tuned import CHOICES, HOPPER_TILES, TILES, HopperTile, HopperTileCase, Kernel, Tile, TileCase
from trainstep.base.errors import UsageError
from trainstep.base.precision import PrecisionName
from trainstep.step.casting import DTYPES, matmul_precision

IMPLEMENTATIONS = ("flash-triton", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient")
"""Implementations that `auto` may stand for. FlexAttention is left out, since it compiles anew for every shape."""
ROUNDS = 3
"""Timed in turns: a GPU at its power cap is some per cent slower from one second to the next; one round of each chose
otherwise in another run."""
FAR_BEHIND = 1.25
"""Candidates that take this many times the fastest's time in the first round are not timed again."""

AnyTile = Tile | HopperTile
_KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkdv")
_PORTABLE = dict(zip(_KERNELS, (forward.launch_forward, backward.launch_dq, backward.launch_dkdv), strict=True))
_HOPPER = dict(zip(_KERNELS, (hopper_forward.launch_forward, hopper_dq.launch_dq, launch_hopper_dkdv), strict=True))

# Of float32: rows a program keeps, rows that stream past them, warps. On Hopper four warps multiply 64 rows; given to
# eight, a tile is cut into products of half the columns, and those of eight columns read beyond it (lab log).
_FLOAT32 = ((64, 32, 4), (64, 64, 4), (128, 32, 8), (128, 64, 8))
_WIDE_FLOAT32 = (
    (16, 32, 4), (32, 32, 4), (32, 32, 8), (32, 64, 8), (64, 16, 4), (64, 32, 4), (64, 64, 4), (128, 32, 8),
)  # from head_dim 128 on  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """A candidate on one case: its median time, or why it has none."""

    kernel: Kernel
    dtype: PrecisionName
    head_dim: int
    is_causal: bool
    tile: AnyTile
    time_ms: float | None
    spills: int | None = None  # registers that the compiler keeps in local memory, as it counts them
    error: str = ""


def tune_tiles(
    *,
    head_dims: Iterable[int] = (16, 32, 64, 128, 256),
    dtypes: Iterable[PrecisionName] = ("bf16", "fp32", "tf32"),
    progress: Callable[[Measurement], None] = lambda _: None,
    save: bool = True,
) -> list[Measurement]:
    """Time every candidate on this GPU at batch · heads · head_dim = 2048 and length 8192; return all measurements.

    float32 comes twice: as it is multiplied under torch's matmul precision "highest" (fp32) and under "high" (tf32).
    `progress` is called after each measurement. With `save`, the fastest tile of each case goes into the user's table
    when the case is done.

    Raises:
        UsageError: there is no GPU, or the user's tables cannot be read.
        RuntimeError: a candidate left the GPU in an error that this process cannot leave; the message names it.
    """
    gpu = _this_gpu()
    results: list[Measurement] = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for head_dim, dtype, is_causal in itertools.product(head_dims, dtypes, (False, True)):
            with matmul_precision(dtype):
                case = _Case(head_dim, dtype, is_causal, seq=8192)
                trials = [(kernel, t) for kernel in _KERNELS for t in candidates(kernel, case.hopper, dtype, head_dim)]
                _compile_ahead(pool, [(head_dim, dtype, is_causal, *trial) for trial in trials])
                for kernel, tile in trials:
                    results.append(case.measure(kernel, tile))
                    progress(results[-1])
                    _check_gpu(results[-1])
            if save:
                tiles, hopper_tiles = fastest(results, gpu)
                TILES.save(tiles)
                HOPPER_TILES.save(hopper_tiles)
    return results


def tune_choice(
    *,
    head_dims: Iterable[int] = (64, 128, 256),
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
    lengths: Iterable[int] = (512, 1024, 2048, 4096, 8192),
    rep_ms: int = 10,
    progress: Callable[[str], None] = lambda _: None,
    save: bool = True,
) -> dict[tuned.ChoiceCase, tuned.Choice]:
    """Time forward + backward of every implementation at 16,384 tokens and width 2048; return the fastest.

    With `save`, they go into the user's table after each dtype, head_dim and masking. Raises UsageError without a GPU,
    or if the user's tables cannot be read.
    """
    gpu = _this_gpu()
    choices: dict[tuned.ChoiceCase, tuned.Choice] = {}
    lengths = sorted(lengths)
    for head_dim, dtype, is_causal in itertools.product(head_dims, dtypes, (False, True)):
        rows: list[tuple[int, str]] = []
        for length in lengths:
            shape = (max(1, 16384 // length), max(1, 2048 // head_dim), length, head_dim)
            times = _in_turns(shape, dtype, is_causal, rep_ms)
            name, time = min(times.items(), key=lambda item: item[1])
            progress(f"{shape} {dtype} causal={is_causal}: {name} {time:.3f} ms of {times}")
            if not rows or rows[-1][1] != name:
                rows.append((length if rows else 0, name))
        case = tuned.ChoiceCase(gpu, str(dtype).removeprefix("torch."), head_dim, is_causal)
        choices[case] = tuned.Choice(tuple(rows))
        if save:
            CHOICES.save(choices)
    return choices


def _this_gpu() -> str:
    """The GPU's name in the tables, all of which can be read: better to fail now than after an hour of measuring."""
    if not torch.cuda.is_available():
        raise UsageError("tuning measures on a GPU, and torch finds none")
    for table in (TILES, HOPPER_TILES, CHOICES):
        table.entries()
    return tuned.gpu_name(torch.cuda.get_device_capability())


def candidates(kernel: Kernel, hopper: bool, dtype: PrecisionName, head_dim: int) -> Iterator[AnyTile]:
    """The configurations worth timing; those that do not fit the GPU fail when measured and drop out."""
    if hopper:
        blocks = {"forward": (64, 128), "dq": (32, 64, 128), "dkdv": (32, 64)}[kernel]
        first_stages = 3 if kernel == "dq" else 2  # dq frees a slot only after it has seen the next but one filled
        fields = itertools.product((2, 3), blocks, range(first_stages, 5), (False, True))
        yield from itertools.starmap(HopperTile, fields)
    elif DTYPES[dtype] == torch.float32:
        for (kept, streamed, warps), stages in itertools.product(_FLOAT32 if head_dim <= 64 else _WIDE_FLOAT32, (1, 2)):
            yield Tile(*((streamed, kept) if kernel == "dkdv" else (kept, streamed)), warps, stages)
    else:
        yield from itertools.starmap(Tile, itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)))


class _Case:
    """Inputs of one head_dim, dtype and masking, with what each kernel needs from the one before it."""

    def __init__(self, head_dim: int, dtype: PrecisionName, is_causal: bool, seq: int) -> None:
        shape = (1, max(1, 2048 // head_dim), seq, head_dim)
        self.inputs = [torch.randn(shape, device="cuda", dtype=DTYPES[dtype]) for _ in range(4)]  # q, k, v, do
        self.dtype, self.is_causal, self.hopper = dtype, is_causal, runs_hopper_kernels(self.inputs[0])
        self.launchers = _HOPPER if self.hopper else _PORTABLE

    def measure(self, kernel: Kernel, tile: AnyTile) -> Measurement:
        about = (kernel, self.dtype, self.inputs[0].shape[-1], self.is_causal, tile)
        try:
            time = triton.testing.do_bench(self.call(kernel, tile), warmup=20, rep=60, return_mode="median")
        except Exception as error:
            return Measurement(*about, None, error=f"{type(error).__name__}: {str(error)[:200]}")
        return Measurement(*about, time, self.launchers[kernel].latest.n_spills)

    def call(self, kernel: Kernel, tile: AnyTile) -> Callable[[], object]:
        q, k, v, do = self.inputs
        out, scale = torch.empty_like(q), q.shape[-1] ** -0.5
        # Any plausible values time alike: a log-sum-exp near log(seq), and delta 0.
        lse, delta = torch.full(q.shape[:-1], 9.0, device=q.device), torch.zeros(q.shape[:-1], device=q.device)
        tensors: tuple[Tensor, ...] = (q, k, v, out, lse)
        if isinstance(tile, HopperTile) and kernel == "dq":
            tensors = (q, k, v, do, q, lse, hopper_dq.empty_statistics(q, tile), out)
        elif self.hopper and kernel == "dkdv":
            tensors = (q, k, v, do, torch.stack([-lse / scale, delta]).flatten(1, 2), out, out)
        elif kernel != "forward":
            tensors = (q, k, v, q, do, lse, delta, out) if kernel == "dq" else (q, k, v, do, lse, delta, out, out)
        return partial(self.launchers[kernel], tensors, self.is_causal, scale, tile)


def _check_gpu(latest: Measurement) -> None:
    """After an illegal access every later call of the process fails, and would look like an unfit candidate."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        tile = f"{latest.kernel} {latest.dtype} head_dim {latest.head_dim} {latest.tile}"
        raise RuntimeError(f"{tile} broke the GPU's context; take it out of `candidates` and tune again") from error


_Job = tuple[int, PrecisionName, bool, Kernel, AnyTile]  # head_dim, dtype, is_causal, and what to compile


def _compile_ahead(pool: ProcessPoolExecutor, jobs: list[_Job]) -> None:
    with suppress(BrokenProcessPool):  # a candidate took its process along: the others compile when they are measured
        list(pool.map(_compile, jobs, chunksize=max(1, len(jobs) // (4 * (os.cpu_count() or 1)))))


def _compile(job: _Job) -> None:
    """Run one candidate on few tokens, in rows that are not short: the compiled kernel is the same, and stays in
    Triton's cache on disk."""
    head_dim, dtype, is_causal, kernel, tile = job
    with suppress(Exception), matmul_precision(dtype):  # what fails, fails again when measured, and is reported there
        _Case(head_dim, dtype, is_causal, seq=2 * hopper_forward.SHORT).call(kernel, tile)()


def fastest(results: list[Measurement], gpu: str) -> tuple[dict[TileCase, Tile], dict[HopperTileCase, HopperTile]]:
    """The fastest measured tile of each case, as entries of the two tables."""
    tiles: dict[TileCase, Tile] = {}
    hopper_tiles: dict[HopperTileCase, HopperTile] = {}
    precisions: dict[str, tuned.TilePrecision] = {"fp32": "tf32x3", "tf32": "tf32"}
    merits = [(m.time_ms * (1.1 if m.spills else 1.0), m) for m in results if m.time_ms is not None]
    for _, best in sorted(merits, key=lambda pair: pair[0], reverse=True):  # the best of a case is put in last
        if isinstance(best.tile, HopperTile):
            case = HopperTileCase(best.kernel, tuned.hopper_block_of(best.head_dim), best.is_causal)
            hopper_tiles[case] = best.tile
        else:
            precision, block = precisions.get(best.dtype, "16-bit"), tuned.block_of(best.head_dim)
            tiles[TileCase(gpu, best.kernel, precision, block, best.is_causal)] = best.tile
    return tiles, hopper_tiles


def _in_turns(shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool, rep_ms: int) -> dict[str, float]:
    """Milliseconds of each of `IMPLEMENTATIONS`: the median of `ROUNDS`, in an order drawn anew each time.

    What is far behind after the first round is not timed again.
    """
    draw = random.Random(0)
    found: dict[str, list[float]] = {impl: [] for impl in IMPLEMENTATIONS}
    for _ in range(ROUNDS):
        best = min((each[0] for each in found.values() if each), default=math.inf)
        near = [impl for impl, each in found.items() if not each or each[0] <= FAR_BEHIND * best]
        for impl in draw.sample(near, len(near)):
            found[impl].append(_time_ms(impl, shape, dtype, is_causal, rep_ms))
    return {impl: median(each) for impl, each in found.items()}


def _time_ms(impl: str, shape: tuple[int, ...], dtype: torch.dtype, is_causal: bool, rep_ms: int) -> float:
    """Median time of forward + backward, without what the host takes to launch them; infinity where `impl` cannot run
    these inputs."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    do = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, is_causal=is_causal, impl=impl), (q, k, v), do)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of every reason why a backend cannot run
        try:
            return float(triton.testing.do_bench_cudagraph(step, rep=rep_ms, return_mode="median"))
        except UsageError:
            return float("inf")
