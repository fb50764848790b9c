"""Tiles cut along head_dim: a tuple of tiles of CHUNK features each, the last one padded.

A sum over many features in one matrix product is rounded toward zero at every addition (see `multiply`), so products
that are to be exact to float32 take a few features at a time. Where CHUNK is all of head_dim there is one chunk.
"""

# Triton knows no unpacking, and types no tuple: the two rules that ask for them are off.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

import triton
import triton.language as tl

from trainstep.attention.triton.multiply import multiply
from trainstep.attention.triton.schedule import load_tile


@triton.jit
def load_chunks(pointer, offsets, dims, mask, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    """The rows at pointer + offsets. dims [1, CHUNK] or [CHUNK, 1]: the features of the first chunk, as in offsets;
    mask: which rows are there, read only where MASKED."""
    chunks = ()
    for first in tl.static_range(0, HEAD_DIM, CHUNK):
        present = dims < HEAD_DIM - first
        if MASKED:
            present = mask & present
        chunks = chunks + (load_tile(pointer + first + offsets, present, MASKED or first + CHUNK > HEAD_DIM),)
    return chunks


@triton.jit
def zero_chunks(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    """Accumulators [ROWS, CHUNK] in float32."""
    chunks = ()
    for _ in tl.static_range(0, HEAD_DIM, CHUNK):
        chunks = chunks + (tl.zeros([ROWS, CHUNK], tl.float32),)
    return chunks


@triton.jit
def scale_chunks(chunks, factor):
    """Every chunk times a number, or times one per row ([ROWS, 1])."""
    scaled = ()
    for i in tl.static_range(len(chunks)):
        scaled = scaled + (chunks[i] * factor,)
    return scaled


@triton.jit
def transpose_chunks(chunks):
    """Each chunk [M, N] as [N, M]."""
    transposed = ()
    for i in tl.static_range(len(chunks)):
        transposed = transposed + (tl.trans(chunks[i]),)
    return transposed


@triton.jit
def multiply_over_features(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b: chunks [M, CHUNK] and [CHUNK, N] → [M, N]."""
    for i in tl.static_range(len(a)):
        acc = multiply(a[i], b[i], acc, PRECISION)
    return acc


@triton.jit
def multiply_each(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b: a tile [M, N] and chunks [N, CHUNK] → chunks [M, CHUNK]."""
    sums = ()
    for i in tl.static_range(len(b)):
        sums = sums + (multiply(a, b[i], acc[i], PRECISION),)
    return sums


@triton.jit
def store_chunks(pointer, offsets, chunks, dims, mask, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    """Store to pointer + offsets, rounded to its dtype; dims and mask as for `load_chunks`."""
    for i in tl.static_range(len(chunks)):
        present = mask & (dims < HEAD_DIM - i * CHUNK)
        tl.store(pointer + i * CHUNK + offsets, chunks[i].to(pointer.dtype.element_ty), mask=present)
