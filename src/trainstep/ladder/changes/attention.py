"""Attention in one kernel: torch's where it is written out, and ours."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainstep.base import advice
from trainstep.base.advice import Line
from trainstep.ladder.change import Change, Settings, operators
from trainstep.ladder.patch import Files, Place, Writer
from trainstep.ladder.trial.trial import Trial

_ANSWERS = ("kernels.softmax", "formulas.attention-written-out", "memory.attention")
_NOT_WRITTEN_OUT = "no attention that is written out as softmax(scale · q kᵀ + mask) v was recognised"


def fused_attention(trial: Trial) -> None:
    """Attention that is written out is torch's fused one; code that is compiled is left to the compiler."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from trainstep.ladder.places.written_out import Finder

    found = trial.places.setdefault(FUSED.name, {})

    def note(line: str, how: str) -> None:
        is_same = found.get(line, how).partition(",")[0] == how.partition(",")[0]
        found[line] = how if is_same else "several masks"

    finder = Finder(note)
    finder.install()
    register_optimizer_step_post_hook(finder.updated)


def _without_softmax(settings: Settings) -> str:
    """A softmax of a loss is another operator."""
    found = operators(settings, "Softmax")
    return _NOT_WRITTEN_OUT if found is not None and not set(found) - {"LogSoftmaxBackward0"} else ""


def _lines(settings: Settings, script: Path) -> Iterator[Place]:
    for line, how in settings.get("places", {}).get(FUSED.name, {}).items():
        file, _, number = line.rpartition(":")
        yield {"file": file, "line": int(number), "how": how}


def _write_call(files: Files, place: Place) -> bool:
    """Have the source call fused attention where that is certain."""
    from trainstep.ladder.places.attention_source import with_fused_attention

    return files.edit(place["file"], lambda text, tree: with_fused_attention(text, tree, place["line"], place["how"]))


FUSED = Change(
    "fused attention",
    advice.FUSED_ATTENTION,
    {"script": 1.25, "cuda": 1.25, "cpu": 1.25},
    answers=_ANSWERS,
    step={"attention": "sdpa"},
    step_if=lambda source, base: source.is_builtin,
    script=fused_attention,
    why_not=_without_softmax,
    nothing=_NOT_WRITTEN_OUT,
    write=Writer(_lines, _write_call),
)


def our_attention(trial: Trial) -> None:
    """Attention without a mask of its own and without dropout, as our kernels compute it: also of grouped heads, which
    are not expanded for it, and of more or fewer keys than queries."""
    import torch.nn.functional as F

    from trainstep.attention.api import attention

    original = F.scaled_dot_product_attention

    @functools.wraps(original)
    def ours(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if attn_mask is not None or dropout_p or not _kernels_take(query, key, value, enable_gqa):
            more = {"enable_gqa": True} if enable_gqa else {}
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
        return attention(query, key, value, is_causal=is_causal, scale=scale, impl="flash-triton")

    F.scaled_dot_product_attention = ours


def _kernels_take(query: Any, key: Any, value: Any, is_grouped: bool) -> bool:
    """True if shapes are those that our attention takes; torch's also takes batches of one for many, and values of
    another width than keys."""
    if not query.is_cuda or query.dim() != key.dim() or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return False
    if query.shape[:-2] == key.shape[:-2]:
        return True
    fits = query.dim() >= 4 and query.shape[:-3] == key.shape[:-3] and key.shape[-3] > 0
    return is_grouped and fits and query.shape[-3] % key.shape[-3] == 0


def _without_attention(settings: Settings) -> str:
    """torch computes it by a softmax where it has no kernel."""
    found = operators(settings, "ScaledDotProduct")
    if found:
        return "its attention drops probabilities" if all("dropping" in each for each in found) else ""
    is_none = found is not None and _without_softmax(settings)
    return "its models call no scaled_dot_product_attention" if is_none else ""


OURS = Change(
    "our FlashAttention",
    Line(
        "trainstep.attention.flash_attention(q, k, v, is_causal=…)",
        "in place of scaled_dot_product_attention, after import trainstep.attention",
    ),
    {"script": 1.22, "cuda": 1.22},
    answers=_ANSWERS,
    step={"attention": "flash-triton"},
    script=our_attention,
    why_not=_without_attention,
    where=("cuda",),
)
