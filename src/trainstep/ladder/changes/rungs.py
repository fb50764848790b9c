"""The changes that the ladder of a script tries, each made from outside, on torch, before the script's code runs.

A change is a function of the `Trial` under way. It replaces a constructor's default, a setting of torch's, or something
about a model that is about to be called for the first time. `why_not` says for which scripts a change is nothing: those
that make it themselves are told so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainstep.base.config import CHANGES
from trainstep.base.precision import PrecisionName
from trainstep.ladder.changes import reasons
from trainstep.ladder.changes.reasons import Settings, workers_here
from trainstep.ladder.trial.trial import Trial

TIMES = 2
"""As many samples as before are in a larger batch."""
BUCKET_MB = 100
"""Of a larger bucket of DDP's, in MiB: four times its default."""


@dataclass(frozen=True)
class Rung:
    """One change."""

    name: str
    change: Callable[[Trial], object]
    lines: str
    """What to write into the script for it."""
    why_not: Callable[[Settings], str] = lambda settings: ""
    """Why it is nothing for a script, in words; empty where it is worth a try."""
    precision: PrecisionName | None = None
    """The precision that it changes to."""
    instead_of: tuple[str, ...] = ()
    """Rungs that it takes the place of."""
    nothing: str = ""
    """Of a change that notes where it was made, in `Trial.places`: why there is no such place, if there is none."""
    trades: Literal["", "time for memory", "the step"] = ""
    """Of a change that is no gain by itself: it computes more to keep less, or takes another step altogether."""

    @property
    def reference(self) -> str:
        """As a task names it."""
        return f"{self.change.__module__}:{self.change.__qualname__}"


def tf32(trial: Trial) -> None:
    """Products of float32 on TF32 units."""
    import torch

    torch.set_float32_matmul_precision("high")


def fused_optimizers(trial: Trial) -> None:
    """Optimizers that are asked neither for `fused` nor for `foreach`, `capturable` or `differentiable`."""
    from trainstep.ladder.trial.settings import FUSED, arguments_of

    other = ("fused", "foreach", "capturable", "differentiable")
    for kind in FUSED:
        _replace(
            kind,
            lambda given: {"fused": True} if all(given.get(name) in (None, False) for name in other) else {},
            arguments_of,
        )


def bf16_autocast(trial: Trial) -> None:
    """Every model that is called in training runs under autocast, and its floating-point results are float32."""
    import torch
    from torch.utils._pytree import tree_map_only

    def change(module: Any) -> None:
        forward, device = module.forward, next(module.parameters()).device.type

        @functools.wraps(forward)
        def cast(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, torch.bfloat16):
                result = forward(*args, **kwargs)
            return tree_map_only(
                torch.Tensor, lambda each: each.float() if each.dtype == torch.bfloat16 else each, result
            )

        module.forward = cast

    trial.on_first_call.append(change)


def fused_attention(trial: Trial) -> None:
    """Attention that is written out is torch's fused one; code that is compiled is left to the compiler."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from trainstep.ladder.changes.written_out import Finder

    places = trial.places.setdefault("fused attention", {})
    finder = Finder(places.__setitem__)
    finder.install()
    register_optimizer_step_post_hook(finder.updated)


def fused_loss(trial: Trial) -> None:
    """A head whose logits go into `F.cross_entropy` is joined with it; where it is compiled, that is the compiler's."""
    from trainstep.ladder.changes.head_loss import HeadLoss

    joined = HeadLoss(trial.places.setdefault("fused loss", {}).__setitem__)
    trial.on_first_call.append(joined.see_model)


def fused_rope(trial: Trial) -> None:
    """Rotary positions that are written out are our kernel's; code that is compiled is left to the compiler."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from trainstep.ladder.changes.rotary import Rotary

    rotary = Rotary(trial.places.setdefault("fused RoPE", {}).__setitem__)
    trial.on_first_call.append(rotary.see_model)
    register_optimizer_step_post_hook(rotary.updated)


def compiled_models(trial: Trial) -> None:
    """Every model that is called in training is compiled in place."""
    trial.on_first_call.append(lambda module: module.compile())


def compiled_blocks(trial: Trial) -> None:
    """The repeated blocks of every model that is called in training are compiled in place."""

    def change(module: Any) -> None:
        from trainstep.step.blocks import find_blocks

        for block in find_blocks(module):
            block.compile()

    trial.on_first_call.append(change)


def any_sizes(trial: Trial) -> None:
    """What the script compiles is compiled once for all sizes that change, and not for each."""
    import torch

    original = torch.compile

    @functools.wraps(original)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "dynamic": True})

    torch.compile = compiled  # what nn.Module.compile calls, too


def channels_last(trial: Trial) -> None:
    """Weights of two-dimensional convolutions have their channels last; results follow."""
    import torch

    trial.on_first_call.append(lambda module: module.to(memory_format=torch.channels_last))


def workers(trial: Trial) -> None:
    """Loaders with fewer workers than there may be have as many.

    They stay after an epoch only where the script has it so: those that are started anew see what the script has done
    to the data set since, such as `set_epoch`.
    """
    from torch.utils.data import DataLoader, IterableDataset

    from trainstep.ladder.trial.settings import arguments_of

    def more(given: dict[str, Any]) -> dict[str, Any]:
        if (given.get("num_workers") or 0) >= workers_here() or isinstance(given.get("dataset"), IterableDataset):
            return {}
        return {"num_workers": workers_here()}

    _replace(DataLoader, more, arguments_of)


def pinned_memory(trial: Trial) -> None:
    """Loaders hand out batches in pinned memory, and copies from there do not wait."""
    import torch
    from torch.utils.data import DataLoader

    from trainstep.ladder.trial.settings import arguments_of

    _replace(DataLoader, lambda given: {} if given.get("pin_memory") else {"pin_memory": True}, arguments_of)
    for name in ("to", "cuda"):
        original = getattr(torch.Tensor, name)

        def moved(tensor: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if not tensor.is_cuda and tensor.is_pinned() and not any(isinstance(each, bool) for each in args):
                kwargs.setdefault("non_blocking", True)
            return _original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, functools.wraps(original)(moved))


def late_reads(trial: Trial) -> None:
    """`item()` of a tensor on a GPU gives a number that is read when it is needed, and `print` waits for none."""
    from trainstep.ladder.changes.late_reads import LateReads

    LateReads(trial.places.setdefault("late reads", {}).__setitem__).install()


def bucket_views(trial: Trial) -> None:
    """torch's DistributedDataParallel keeps gradients in its buckets, in place of a copy of each."""
    _replace_of_ddp("gradient_as_bucket_view", True)


def static_graph(trial: Trial) -> None:
    """torch's DistributedDataParallel takes it that every step uses the same parameters in the same order."""
    _replace_of_ddp("static_graph", True)


def larger_buckets(trial: Trial) -> None:
    """torch's DistributedDataParallel sends gradients in fewer and larger parts; the first is no longer a small one."""
    _replace_of_ddp("bucket_cap_mb", BUCKET_MB)


def _replace_of_ddp(name: str, value: object) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from trainstep.ladder.trial.settings import arguments_of

    _replace(DistributedDataParallel, lambda given: {} if given.get(name) else {name: value}, arguments_of)


def checkpointed_blocks(trial: Trial) -> None:
    """The repeated blocks of every model that is called in training keep their inputs alone, and backward runs them
    again, with the random numbers of the first time."""

    def change(module: Any) -> None:
        from trainstep.checkpointing.recomputing import Checkpointing
        from trainstep.step.blocks import find_blocks

        if find_blocks(module):
            Checkpointing(module, "every-1")

    trial.on_first_call.append(change)


def larger_batch(trial: Trial) -> None:
    """Loaders that are told a batch size make batches of twice as many samples. A loader that is made of another one's
    arguments, as Lightning does, has the larger size already."""
    from torch.utils.data import DataLoader

    from trainstep.ladder.trial.settings import arguments_of, batch_size_of

    made: list[tuple[Any, int]] = []

    def more(given: dict[str, Any]) -> dict[str, Any]:
        size, data = batch_size_of(given), given.get("dataset")
        if size is None or any(each is data and known == size for each, known in made):
            return {}
        made.append((data, TIMES * size))
        return {"batch_size": TIMES * size}

    _replace(DataLoader, more, arguments_of)


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
    """Whether shapes are those that our attention takes; torch's also takes batches of one for many, and values of
    another width than keys."""
    if not query.is_cuda or query.dim() != key.dim() or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return False
    if query.shape[:-2] == key.shape[:-2]:
        return True
    fits = query.dim() >= 4 and query.shape[:-3] == key.shape[:-3] and key.shape[-3] > 0
    return is_grouped and fits and query.shape[-3] % key.shape[-3] == 0


def _replace(kind: Any, more: Callable[[dict[str, Any]], dict[str, Any]], arguments_of: Any) -> None:
    """Have a constructor take further arguments, in place of those of the same name."""
    original = kind.__init__
    names = list(inspect.signature(kind).parameters)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        changed = more(arguments_of(kind, args, kwargs))
        given = list(args)
        for name, value in changed.items():
            place = names.index(name)
            if place < len(given):
                given[place] = value
            else:
                kwargs[name] = value
        original(self, *given, **kwargs)

    kind.__init__ = __init__


def _rung(name: str, change: Callable[[Trial], object], *more: Any, **also: Any) -> Rung:
    """With the lines that both ladders name."""
    return Rung(name, change, CHANGES[name].text, *more, **also)


RUNGS = (
    _rung("TF32 matmuls", tf32, reasons.of_tf32, "tf32"),
    _rung("bf16 autocast", bf16_autocast, reasons.of_autocast, "bf16"),
    _rung(
        "fused attention",
        fused_attention,
        reasons.of_attention,
        nothing=reasons.NOT_WRITTEN_OUT,
    ),
    _rung("our FlashAttention", our_attention, reasons.of_our_attention),
    _rung("fused loss", fused_loss, reasons.of_loss, nothing=reasons.NO_HEAD_LOSS),
    _rung("fused RoPE", fused_rope, reasons.of_rope, nothing=reasons.NO_ROPE),
    _rung("channels last", channels_last, reasons.of_channels),
    _rung("compiled blocks", compiled_blocks, reasons.of_blocks, instead_of=("fused RoPE",)),
    _rung(
        "compiled model",
        compiled_models,
        reasons.of_compile,
        instead_of=("compiled blocks", "fused loss", "fused RoPE"),
    ),
    _rung("compiled for any size", any_sizes, reasons.of_sizes),
    _rung("fused optimizer", fused_optimizers, reasons.of_fused),
    _rung("pinned memory", pinned_memory, reasons.of_pinning),
    _rung("loader workers", workers, reasons.of_workers),
    _rung("late reads", late_reads, reasons.of_reads, nothing=reasons.NO_READS),
    _rung("DDP's buckets as gradients", bucket_views, reasons.of_ddp("gradient_as_bucket_view")),
    _rung("DDP's static graph", static_graph, reasons.of_ddp("static_graph")),
    _rung("DDP's larger buckets", larger_buckets, reasons.of_buckets),
    _rung("checkpointed blocks", checkpointed_blocks, reasons.of_checkpointing, trades="time for memory"),
    _rung("larger batch", larger_batch, reasons.of_batches, trades="the step"),
)
"""In the order in which they are tried: what the device does before what the host does, which weighs more after it."""
