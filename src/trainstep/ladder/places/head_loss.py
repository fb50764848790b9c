"""Cross-entropy of a head's logits, computed with the head by chunks of tokens: the logits of all never exist.

It is found from outside, as it is called: an `nn.Linear` that may be a head gives `Logits`, a tensor that is not
computed yet. What scripts do with logits on their way to a loss (views, slices of tokens, a wider dtype, classes moved
to the second dimension) is done with the hidden states in their place, and `F.cross_entropy` of them is the joined
loss: our kernels' where they run, else the chunked one. Whatever else is done with any of them computes them as the
script wrote it, at once; a head whose logits are looked at before they reach a loss is left alone from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_iter, tree_map_only

from trainstep.base.errors import UnsupportedError
from trainstep.ladder.places.logits import Head, Logits, Product
from trainstep.ladder.places.uncomputed import CASTS, SELF, Dtypes, cast_to, is_transformed
from trainstep.observe.lines import line_of_call
from trainstep.step.blocks import find_blocks

Note = Callable[[str, str], object]
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
"""Names of classes that take a head's weight away after its forward."""


class HeadLoss:
    """Finds heads whose logits go into a loss, from `see_model` on.

    Args:
        note: called with the line of a loss that was joined and with how, and with a line that looks at the logits of
            one.
    """

    def __init__(self, note: Note) -> None:
        self.note = note
        self.linear: Callable[..., Tensor] = F.linear
        self.updates = 0
        self._heads: dict[int, Head] = {}
        self._dtypes = Dtypes()
        self._is_installed = False

    def see_model(self, module: nn.Module) -> None:
        """A model that is about to be called in training; its heads are looked for."""
        if any(kind.__name__ in _SHARDED for part in module.modules() for kind in type(part).__mro__):
            return
        for weight, least_dims in _weights_of_heads(module):
            self._heads[id(weight)] = Head(weight, least_dims)
        if self._heads and not self._is_installed:
            self._is_installed = True
            self._install()

    def _install(self) -> None:
        original = self.linear = F.linear

        @functools.wraps(original)
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if torch.compiler.is_compiling() or id(weight) not in self._heads:
                return original(input, weight, bias)
            return self._logits(input, weight, bias)

        F.linear = linear
        register_optimizer_step_post_hook(self._updated)

    def _updated(self, *_: object) -> None:
        self.updates += 1

    def _logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        head = self._heads[id(weight)]
        is_head = not head.is_left and head.weight() is weight
        if not is_head or not _may_be_logits(hidden, weight, bias) or hidden.dim() < head.least_dims:
            return self.linear(hidden, weight, bias)
        given = (hidden, weight) if bias is None else (hidden, weight, bias)
        dtype = self._dtypes.of(self.linear, given, {})
        if dtype is None:
            return self.linear(hidden, weight, bias)
        return Logits.made(Product(self, head, hidden, weight, bias), (), hidden, dtype)

    def further(self, own: Logits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """Result of another call: a loss, further logits, or None where it is neither's."""
        name = getattr(func, "__name__", "")
        if func is F.cross_entropy:
            return self._joined(own, *args[1:], **kwargs)
        if any(isinstance(each, Logits) for each in tree_iter((args[1:], kwargs))):
            return None
        if name in CASTS:
            dtype = cast_to(name, args, kwargs)
            # To float64 from less is none that a loss has: it computes in float32.
            is_kept = dtype == own.dtype or (dtype == torch.float32 and own.dtype in (torch.float16, torch.bfloat16))
            return _then(own, Tensor.to, (own, dtype), {}, own.states, dtype) if is_kept else None
        if name == "contiguous" and len(args) == 1 and not kwargs:
            return _then(own, func, args, kwargs, own.states)
        if own.is_second:
            return None
        if own.dim() == 3 and _moves_classes(name, args, kwargs):
            return _then(own, func, args, kwargs, own.states, is_second=True)
        states = _with_shape(own, name, func, args, kwargs) if name in _SHAPES else None
        if name == "__getitem__" and _keeps_classes(args[1], own.dim()):
            args = (own, tree_map_only(Tensor, torch.clone, args[1]))  # as it is now
            states = own.states[args[1]]
        return None if states is None else _then(own, func, args, kwargs, states)

    def _joined(
        self,
        own: Logits,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """`F.cross_entropy` of its arguments; None for another loss than the plain one of ids."""
        product = own.product
        is_plain = weight is size_average is reduce is None and not label_smoothing and reduction in ("mean", "sum")
        if not is_plain or not (own.dim() == 2 or own.is_second):
            return None
        is_ids = type(target) is Tensor and target.dtype == torch.int64 and target.shape == own.states.shape[:-1]
        if not is_ids or not target.numel():
            return None
        dtype = self._dtypes.of(F.cross_entropy, (own, target), {"reduction": reduction})
        if dtype is None or target.device != own.device:
            return None
        product.check()
        states, ids = own.states.reshape(-1, own.states.shape[-1]), target.reshape(-1)
        with product.state.entered():
            how, loss = self._loss(product, states, ids, {"reduction": reduction, "ignore_index": ignore_index})
        product.is_joined = True
        self.note(line_of_call(), how)
        return loss.to(dtype)

    def _loss(self, product: Product, states: Tensor, ids: Tensor, options: dict[str, Any]) -> tuple[str, Tensor]:
        """By our kernels where they take these tensors, else in plain torch, which computes logits twice."""
        weight, bias = product.weight, product.bias
        if bias is None and _kernels_take(states, weight):
            from trainstep.fused.cross_entropy import weight_cross_entropy

            return "by our kernels", weight_cross_entropy(states, weight, ids, **options)
        from trainstep.step.model.transformer import chunked_cross_entropy

        def head(part: Tensor) -> Tensor:
            product.check()  # backward computes logits again
            return self.linear(part, weight, bias)

        return "in chunks, by torch", chunked_cross_entropy(states, head, ids, **options)


def _weights_of_heads(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Weights of linear layers as wide as an embedding has rows, of the last one, and of embeddings themselves; each
    with how many dimensions its input has at least. A last one that is as wide as nothing may be a classifier's, whose
    logits are few: its input has to have tokens. What is in a block is none, though positions may be as many as an MLP
    is wide."""
    in_blocks = {part for block in find_blocks(module) for part in block.modules() if part is not block}
    parts = [part for part in module.modules() if part not in in_blocks]
    embeddings = [part for part in parts if isinstance(part, nn.Embedding)]
    linears = [part for part in parts if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward]
    rows = {each.num_embeddings for each in embeddings}
    for part in (*linears[-1:], *embeddings, *linears):
        if type(weight := part._parameters.get("weight")) is nn.Parameter and not hasattr(weight, "ds_id"):
            if part in embeddings or part.out_features in rows:
                yield weight, 2
            elif part is linears[-1]:
                yield weight, 3


def _may_be_logits(hidden: Any, weight: Tensor, bias: Any) -> bool:
    """True if a product is that of a head in training: of activations with dimensions of tokens, with gradients."""
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    if type(hidden) is not Tensor or type(weight) is not nn.Parameter or type(bias) not in (nn.Parameter, type(None)):
        return False
    if is_transformed(*tensors) or any(each.is_inference() for each in tensors):
        return False
    return (
        torch.is_grad_enabled()
        and any(each.requires_grad for each in tensors)
        and hidden.shape[-1] == weight.shape[-1]
        and hidden.numel() > 0
        and hidden.device == weight.device
        and hidden.device.type in ("cpu", "cuda")
        and hidden.layout == weight.layout == torch.strided
        and not torch._C._is_tracing()
    )


def _kernels_take(states: Tensor, weight: Tensor) -> bool:
    try:
        from trainstep.fused.operators import require
    except ImportError:  # no Triton here
        return False
    try:
        require("the fused loss", states=states, weight=weight)
    except (TypeError, UnsupportedError):
        return False
    return True


def _then(
    own: Logits,
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    states: Tensor,
    dtype: torch.dtype | None = None,
    *,
    is_second: bool | None = None,
) -> Logits:
    calls = (*own.calls, (func, (SELF, *args[1:]), kwargs))
    if is_second is None:
        is_second = own.is_second
    return Logits.made(own.product, calls, states, dtype or own.dtype, is_second=is_second)


_SHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze")


def _with_shape(own: Logits, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The states in the shape that a call gives logits; None where it does not leave their last dimension alone."""
    try:
        shape = func(torch.empty(own.shape, dtype=own.dtype, device="meta"), *args[1:], **kwargs).shape
    except (RuntimeError, TypeError, IndexError):
        return None
    if len(shape) < 2 or shape[-1] != own.shape[-1]:
        return None
    return own.states.reshape(*shape[:-1], own.states.shape[-1])


def _moves_classes(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if a call swaps the last two of three dimensions."""
    if kwargs:
        return False
    given = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else list(args[1:])
    if not all(isinstance(each, int) for each in given):
        return False
    places = [each % 3 for each in given]
    if name in ("transpose", "swapaxes", "swapdims"):
        return sorted(places) == [1, 2]
    return name == "permute" and places == [0, 2, 1]


def _keeps_classes(index: Any, dims: int) -> bool:
    """True if an index into logits takes all of the last dimension, so that it may be one into the hidden states."""
    items = index if isinstance(index, tuple) else (index,)
    used = 0  # dimensions
    for each in items:
        if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.int64):
            used += each.dim() if each.dtype == torch.bool else 1
        elif isinstance(each, slice) or (isinstance(each, int) and not isinstance(each, bool)):
            used += 1
        elif each is not None and each is not ...:
            return False
    is_whole = bool(items) and isinstance(items[-1], slice) and items[-1] == slice(None)
    if ... in [each for each in items if not isinstance(each, Tensor)] and items[-1] is not ...:
        return is_whole
    return used < dims or (used == dims and is_whole)
