"""Documents packed end to end into one row, each attending within itself: `cu_seqlens`, as flash-attn's varlen has it.

Document d is the tokens cu_seqlens[d], …, cu_seqlens[d + 1] - 1, so the first of the n + 1 offsets is 0 and the last
the length of the row. They hold for every batch row and head.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from trainstep.attention.inputs import four_dims
from trainstep.base.errors import UsageError

EXAMPLE = "torch.tensor([0, 5, 9]) for documents of 5 and 4 tokens"


def check_documents(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """The offsets on q's device, or None where they divide nothing: where there are none, or there is one document.

    Raises TypeError (no tensor of int32 or int64), UsageError (another shape or device, not as many keys as queries,
    offsets on a CPU that do not rise from 0 to the length). Offsets on a GPU are asserted there, as asking for them
    would make the host wait: the kernels read no memory but the row's, whatever they are.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens is {got}; expected a tensor of int32 or int64, as {EXAMPLE}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise UsageError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; expected one offset more than documents, as {EXAMPLE}"
        )
    if cu_seqlens.device.type != "cpu" and cu_seqlens.device != q.device:
        raise UsageError(f"cu_seqlens is on {cu_seqlens.device} and q on {q.device}; move it there, or to the CPU")
    total = q.shape[-2]
    if total != k.shape[-2]:
        raise UsageError(
            f"q has {total} tokens and k {k.shape[-2]}; documents attend to themselves, so pass as many keys as queries"
        )
    _check_offsets(cu_seqlens, total)
    return cu_seqlens.to(q.device, non_blocking=True) if len(cu_seqlens) > 2 else None


def _check_offsets(cu_seqlens: Tensor, total: int) -> None:
    wanted = f"expected offsets that begin at 0, never fall and end at {total}, q's length, as {EXAMPLE}"
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        falls = (cu_seqlens[1:] < cu_seqlens[:-1]).nonzero()
        if first != 0 or last != total:
            raise UsageError(f"cu_seqlens begins at {first} and ends at {last}; {wanted}")
        if len(falls):
            place = int(falls[0])
            raise UsageError(
                f"cu_seqlens falls from {int(cu_seqlens[place])} to {int(cu_seqlens[place + 1])} at index {place + 1}; "
                f"{wanted}"
            )
        return
    rises = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    torch._assert_async(rises & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total), f"cu_seqlens: {wanted}")


def document_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """Document of each of `total` tokens, counted from 1, in the offsets' dtype (total,)."""
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True)


def bounds(cu_seqlens: Tensor, total: int) -> Tensor:
    """The first token of each token's document, and below it the one past the last: int32 (2, total), contiguous.

    Within 0 and total for any offsets at all, so that a kernel which takes its loops from them stays within its row.
    """
    document = document_of(cu_seqlens, total).clamp(1, len(cu_seqlens) - 1)
    return torch.stack((cu_seqlens[document - 1], cu_seqlens[document])).clamp(0, total).int()


def spans(cu_seqlens: Tensor) -> list[slice]:
    """The tokens of each document that has any, known to the host, which waits for them."""
    offsets = cu_seqlens.tolist()
    return [slice(first, end) for first, end in itertools.pairwise(offsets) if end > first]


def token_first(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """q, k, v (tokens, heads, head_dim), all batch rows end to end, int32 offsets of all their documents, and the
    length of the longest, for which the host waits.

    What FlashAttention's varlen functions take. Without offsets every batch row is a document, and nothing waits.
    """
    q4, k4, v4, _ = four_dims(q, k, v)
    batch, _, total, _ = q4.shape
    rows = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * total
    offsets, longest = rows, total
    if cu_seqlens is not None:
        offsets = torch.cat(((rows[:-1, None] + cu_seqlens[:-1]).flatten(), rows[-1:])).int()
        longest = int(cu_seqlens.diff().max())
    flat = (each.transpose(1, 2).flatten(0, 1) for each in (q4, k4, v4))
    return (*flat, offsets, longest)  # type: ignore[return-value]


def heads_first(o: Tensor, q: Tensor) -> Tensor:
    """`token_first`'s result (tokens, heads, head_dim) in q's shape."""
    heads = q.shape[-3] if q.ndim >= 3 else 1
    return o.reshape(-1, q.shape[-2], heads, q.shape[-1]).transpose(1, 2).reshape(q.shape)
