"""Configurations that are shipped, compiled for their GPUs without one: they fit, and on Hopper use its hardware."""

import itertools
import multiprocessing
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest

from tests.attention.triton.aot import Compiled, compile_fused, compile_hopper, compile_portable
from tests.attention.triton.sass import overwritten_in_flight, products_from_registers, reads_registers
from trainstep.attention.hopper.forward import FIRST_TURN, SHORT, for_rows
from trainstep.attention.tuned import HOPPER_TILES, TILES, HopperTile, HopperTileCase, TileCase

# Shared memory that one program may use, bytes (CUDA C++ Programming Guide, table of compute capabilities; "other" is
# held to what 8.6, 8.9 and 12.0 have, the least since 8.0).
LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "other": 99 * 1024}
CAPABILITY = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "other": 86}

PORTABLE, HOPPER = TILES.shipped(), HOPPER_TILES.shipped()
FUSED = (64, 128)  # features that the one-kernel backward is compiled for


def _portable(row: TileCase) -> Compiled:
    dtype, multiply = ("bf16", "tf32") if row.precision == "16-bit" else ("fp32", row.precision)
    capability = CAPABILITY[row.gpu]
    return compile_portable(row.kernel, PORTABLE[row], capability, dtype, row.head_dim, row.is_causal, multiply)


def _hopper(row: HopperTileCase) -> Compiled:
    return compile_hopper(row.kernel, HOPPER[row], row.head_dim, row.is_causal)


def _read(compilers: Executor, kernels: Sequence[Compiled], *, least: int) -> list[str]:
    """Their machine code. Of at least so many, products read registers, and no such register is written in flight."""
    listings = list(compilers.map(_listing, kernels))
    found = [each for listing in listings for each in overwritten_in_flight(listing)]
    assert not found
    assert sum(bool(products_from_registers(listing)) for listing in listings) >= least
    return listings


def _listing(compiled: Compiled) -> str:
    return compiled.sass


@pytest.fixture(scope="module")
def compilers() -> Iterator[Executor]:
    """Two processes, started anew: one that is forked has locks of threads that it does not have, and may crash."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 6))]
"""Every sixth configuration: compiling all of them takes both cores of a test machine five minutes."""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("arch", CAPABILITY)
def test_every_portable_configuration_compiles_and_fits(arch: str, part: int, compilers: Executor) -> None:
    # A causal kernel contains the full one: where both have one configuration, compiling it says both.
    every = [
        row
        for row, tile in PORTABLE.items()
        if row.gpu == arch and (row.is_causal or tile != PORTABLE[row._replace(is_causal=True)])
    ]
    assert len(every) >= 45
    rows = every[part::6]
    compiled = dict(zip(rows, compilers.map(_portable, rows), strict=True))
    too_large = {row: c.shared_bytes for row, c in compiled.items() if c.shared_bytes > LIMITS[arch]}
    assert not too_large
    # A kernel that the compiler found to be undefined is a trap, which compiles and fits as well.
    assert not [row for row, c in compiled.items() if "mma" not in c.ptx or "st.global" not in c.ptx]
    if arch == "sm_90":
        # Products of eight columns read beyond the shared memory that Triton gives them (its issue 10629).
        assert not [row for row, c in compiled.items() if "m64n8k" in c.ptx]
        # In 16 bits the portable kernels run there up to head_dim 32.
        small = {row: c for row, c in compiled.items() if row.precision == "16-bit" and row.head_dim <= 32}
        assert small or part == 5, "all parts but the last have some"
        assert all("wgmma.mma_async" in c.ptx and c.spilled_bytes == 0 for c in small.values())
        _read(compilers, [c for c in compiled.values() if reads_registers(c.ptx)], least=6)


MORE = (("window",), ("bounds_ptr",), ("window", "bounds_ptr", "cap"))


def _with_more(row: TileCase, band: tuple[str, ...]) -> Compiled:
    capability = CAPABILITY[row.gpu]
    return compile_portable(row.kernel, PORTABLE[row], capability, "bf16", row.head_dim, True, "tf32", band=band)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.thorough)])
def test_the_kernels_of_windows_documents_and_softcaps_compile_and_fit(head_dim: int, compilers: Executor) -> None:
    """In 16 bits, at the head_dims that are used most. On Hopper, where they run instead of its own, none spills."""
    cases = [
        (row, band)
        for row in PORTABLE
        for band in MORE
        if row.precision == "16-bit" and row.head_dim == head_dim and row.is_causal
        if row.gpu == "sm_90" or (row.gpu != "other" and band == MORE[-1])
    ]
    assert len(cases) == 3 * (3 + 1 + 1)
    compiled = list(zip(cases, compilers.map(_with_more, *zip(*cases, strict=True)), strict=True))
    for (row, _), result in compiled:
        assert result.shared_bytes <= LIMITS[row.gpu], row
        assert "mma" in result.ptx, row
        assert "st.global" in result.ptx, row
    hopper = [result for (row, _), result in compiled if row.gpu == "sm_90"]
    assert all("wgmma.mma_async" in result.ptx and "m64n8k" not in result.ptx for result in hopper)
    assert [result.spilled_bytes for result in hopper] == [0] * 9
    _read(compilers, hopper, least=9)


def _windowed(row: HopperTileCase) -> Compiled:
    return compile_hopper(row.kernel, HOPPER[row], row.head_dim, True, window=1024)


def _windowed_backward(head_dim: int) -> Compiled:
    return compile_fused(head_dim, True, has_window=True)


def _short(row: HopperTileCase) -> Compiled:
    return compile_hopper(row.kernel, HOPPER[row], row.head_dim, True, n_queries=SHORT)


def test_what_depends_on_the_rows() -> None:
    three, two, deep = HopperTile(3, 128, 2), HopperTile(2, 128, 2), HopperTile(2, 128, 3)
    assert for_rows(three, 64, True, SHORT, None) == for_rows(three, 64, True, 8192, 100) == (two, True)
    assert for_rows(three, 64, True, SHORT + 1, None) == for_rows(three, 64, False, SHORT, None) == (three, True)
    assert for_rows(two, 128, True, SHORT, None) == (two, True)
    assert for_rows(two, 128, True, SHORT + 1, None) == for_rows(two, 128, False, SHORT, None) == (two, False)
    assert for_rows(HopperTile(2, 64, 2), 256, True, SHORT, None) == (HopperTile(2, 64, 2), False)
    assert for_rows(deep, 128, False, 4096, None) == (two, False), "a table of before results had tiles of their own"
    assert for_rows(deep, 64, True, SHORT, None) == (deep, True)


def test_every_hopper_configuration_compiles_and_fits(compilers: Executor) -> None:
    """All but the two kernels of a deterministic backward without a mask, which have less of the same."""
    rows = [row for row in HOPPER if row.kernel == "forward" or row.is_causal]
    compiled = list(zip(rows, compilers.map(_hopper, rows), strict=True))
    short = [row for row in rows if row.kernel == "forward" and row.is_causal and row.head_dim <= 128]
    windowed = short
    compiled += zip(short, compilers.map(_short, short), strict=True)
    fused = list(itertools.product(FUSED, (False, True)))
    compiled += zip(fused, compilers.map(compile_fused, *zip(*fused, strict=True)), strict=True)
    compiled += zip(windowed, compilers.map(_windowed, windowed), strict=True)
    compiled += zip(FUSED, compilers.map(_windowed_backward, FUSED), strict=True)
    listings = _read(compilers, [result for _, result in compiled], least=22)
    for (row, result), code in zip(compiled, listings, strict=True):
        # The assembler waits for each product by itself where registers of one are written while others are in flight.
        assert code.count("WARPGROUP.DEPBAR") * 3 <= code.count("HGMMA"), row
        if row in HOPPER and row.kernel == "forward":
            assert "PRMT" not in code, f"{row}: halves of registers are taken apart"
            own = [int(barrier) for barrier in re.findall(r"\bbar(?:rier)?\.\S+\s+(\d+)", result.ptx)]
            assert max(own) < FIRST_TURN.value, "Triton's own barriers are no consumer's turn"
    for row, result in compiled:
        if row in fused:
            assert "cp.reduce.async.bulk.tensor" in result.ptx, row
        assert result.shared_bytes <= LIMITS["sm_90"], row
        assert "wgmma.mma_async" in result.ptx, row
        assert "cp.async.bulk.tensor" in result.ptx, row
        assert result.spilled_bytes == 0, row
        barriers, handed_over = _writes_before_the_roles(result.ptx)
        assert barriers, row
        assert handed_over, row
        assert not barriers & handed_over, row


def _writes_before_the_roles(ptx: str) -> tuple[set[int], set[int]]:
    """Bytes of shared memory that hold barriers, and bytes written for the other warps to read when they start.

    Nothing orders the initialisation of a barrier and a store to the same place.
    """
    start = ptx[: ptx.index("barrier.sync")]
    assert start.count("mbarrier.init") == ptx.count("mbarrier.init")
    offset_of = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", start))
    barriers = [int(offset_of[register]) for register in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", start)]
    stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+)\s+\[(?:global_smem|%r\d+)\+(\d+)\]", start)
    written = [(int(offset), int(count or 1) * int(bits) // 8) for count, bits, offset in stores]
    return (
        {byte for first in barriers for byte in range(first, first + 8)},
        {byte for first, size in written for byte in range(first, first + size)},
    )
