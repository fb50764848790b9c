"""Rounding of a computation in a precision, measured without another implementation: rounding it at random.

Every operation whose result has the precision's format is rounded once more: one result in twelve moves by one unit in
the last place, up or down. Moves of one unit with probability 1/12 have the mean square of rounding to nearest, which
is uniform over half a unit to both sides: ulp²/12 (Higham 2002, section 2.6, has the model; CESTAC and stochastic
arithmetic use it the same way). So the difference to the undisturbed computation is as large as what rounding does.

Products sum. In float32 a sum of K terms rounds at every term, in an order that each implementation chooses: with terms
of either sign the partial sums grow as √k, and their roundings add up to r·√(K/2) of √Σ(ab)², or of the result where
that is larger. It is not the result alone: gradients of queries cancel, and their errors do not. Here r is what one
rounding errs by in the root mean square: u/√3/m for m · 2ᵉ, and the mean of 1/m² is 3/(8 ln 2) where leading digits are
spread as they usually are. Narrower formats sum in float32.

TF32 has no format of its own: products take their float32 inputs rounded to 11 bits, and what that does is computed,
with a random sign for each of the two. It is not noise: a weight is rounded alike for all tokens, and tokens that are
alike are, too, so that sums over thousands of tokens do not cancel it.

Softmax's backward has a sum inside, of a row, and its error is one for the whole row. Fused attention takes it from
other numbers than the formula, as the product of the output and its gradient; and an output is a sum over all keys,
which matrix units cut off where others round (`CUT_OFF`): for all rows alike. Gradients of queries and keys that nearly
cancel, as over thousands of tokens in a late block, show that as nothing else does. In TF32 and 16 bits it is
roundings of the output that show (`row_sums`). In TF32 all roundings inside of fused attention are drawn, as its
results are computed by the formula (`write_out`); elsewhere none but that sum's. PyTorch's own kernels compute
float32's attention as exactly in TF32 as without it (seen on an H100), and others that take their place do not.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.base.precision import PRECISIONS, PrecisionName
from trainstep.check.row_sums import RowSums
from trainstep.step.batches import tensors_of
from trainstep.step.casting import in_tf32, matmul_precision
from trainstep.step.randomness import DRAWING

_ONE_IN = 12
"""results moves, by one unit in the last place up or down."""
_POOL = 2**22
"""Moves that are drawn beyond those of the largest tensor: each tensor takes its own from another place."""
_MEAN = (3 / (8 * math.log(2)) / 3) ** 0.5
"""Error of rounding to nearest, in the root mean square: this part of the unit roundoff."""
_TF32_NOISE = 2**-11 * _MEAN * 2**0.5
"""Error of both inputs of a convolution, taken as independent of each other and of all others."""
CUT_OFF = 2**-30
"""By which part a long sum of float32 products on matrix units is too small, for each of its terms; half of it, as
float32's budget is more than twice the usual one (`tolerance.FLOAT32_LOSES`). PyTorch's fused attention was off in one
direction by up to 9e-7 with 512 keys on an H200 (notebook/lab-log.md, 2026-11-23): 2⁻²⁹ for each."""
CUTTING = ("cuda",)
"""Types of devices with matrix units for float32."""
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Products, and which argument is the left factor."""
_CONVOLUTIONS = (_aten.convolution, _aten.convolution_backward)
FUSED = (_aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_flash_attention_for_cpu)
FUSED_BACKWARD = (
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
"""Fused attention that takes float32."""
MOST_SCORES = 2**26
"""Scores that are held at once where attention is written out; of longer contexts some queries' at a time."""
_EXACT = (_aten.clone, _aten.cat, _aten.stack, _aten.index_select, _aten.embedding, _aten.gather, _aten.neg, _aten.relu)
"""Operations that move numbers without rounding them."""
_WHOLE = (_aten.histc, _aten.floor, _aten.ceil, _aten.round, _aten.trunc, _aten.arange, _aten.full, _aten.ones)
"""Operations whose results are counts and the like: one unit less, and what is cut off to an index is another index."""


class RandomRounding(TorchDispatchMode):
    """While entered, results of the precision's computed format are rounded once more at random, in backward too.

    Args:
        precision: whose rounding; float32's are those of all results.
        seed: of the random numbers, which are its own.
    """

    def __init__(self, precision: PrecisionName, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        entry = PRECISIONS[precision]
        self._tf32 = entry.uses_tf32
        self._dtype = getattr(torch, entry.computed)
        self._row_sums = RowSums(self._dtype) if precision != "fp32" else None
        self._seed, self._offsets = seed, random.Random(seed)
        self._generators: dict[torch.device, torch.Generator] = {}
        self._pools: dict[torch.device, Tensor] = {}
        self._scalars = 0  # drawn for so far
        self.is_off = False  # whether results stay as they are

    def __enter__(self) -> Self:
        DRAWING.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        DRAWING.remove(self)

    def random_state(self) -> Any:
        """State of the random roundings, from which a block that is computed again draws anew, so that it rounds as it
        did."""
        states = {device: generator.get_state() for device, generator in self._generators.items()}
        return self._offsets.getstate(), states, dict(self._pools), self._scalars

    def restore_random_state(self, state: Any) -> None:
        """Go on from there."""
        offsets, states, pools, self._scalars = state
        self._offsets.setstate(offsets)
        self._pools = dict(pools)
        for device in [*self._generators]:
            if device in states:
                self._generators[device].set_state(states[device])
            else:
                del self._generators[device]  # it draws from its seed again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_off:
            return func(*args, **(kwargs or {}))
        if func.overloadpacket in FUSED_BACKWARD and self._dtype == torch.float32 and not self._tf32:
            args = self._round_rows(func, args)
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is _aten.copy_:  # a wider tensor's values stored in a narrow one
            if args[0].dtype != args[1].dtype and args[1].is_floating_point():
                self._round(args[0])
        elif func.overloadpacket is _aten._to_copy and not args[0].is_floating_point():
            pass  # whole numbers stay so
        elif self._tf32 and func.overloadpacket in (*FUSED, *FUSED_BACKWARD) and args[0].dtype == torch.float32:
            self._take_apart(func, args, kwargs or {}, result)
        elif func.overloadpacket in _PRODUCTS or func.overloadpacket in _CONVOLUTIONS:
            self._round_products(func.overloadpacket, args, result)
        elif func.overloadpacket is _aten._softmax_backward_data:
            self._round_softmax(args, result)
            if not self._tf32:
                self.round(result)
        elif (
            not self._tf32
            and func.overloadpacket not in (*_EXACT, *_WHOLE)
            and not any(each.alias_info for each in func._schema.returns)
        ):
            self.round(result)
        if self._row_sums is not None:
            self._row_sums.see(func.overloadpacket, args, result)
        return result

    def _round_products(self, product: Any, args: Any, result: Any) -> None:
        """Sums of products: as their terms are rounded in float32 and TF32, as results in narrower formats."""
        for each in tensors_of(result):
            if self._dtype != torch.float32 or each.dtype != torch.float32:
                self._round(each)
                continue
            if product in _PRODUCTS and self._tf32:
                self._round_inputs(each, *args[_PRODUCTS[product] :][:2])
                continue
            if product in _PRODUCTS:
                left, right = args[_PRODUCTS[product] :][:2]
                with matmul_precision("tf32"):  # three digits of a size are enough, and cost a GPU an eighth
                    terms, typical = left.shape[-1], (left.square() @ right.square()).sqrt_()
            else:  # multiplications per result, whether of outputs, inputs or weights
                weight, outputs = (args[1], result) if product is _aten.convolution else (args[2], args[0])
                terms = outputs.numel() * weight[0].numel() / each.numel()
                typical = each.square().mean(-1, keepdim=True).sqrt_()
            size = _TF32_NOISE * typical if self._tf32 else _sum_error(terms) * torch.maximum(typical, each.abs())
            each.add_(self._normal(each.shape, each.device).mul_(size))

    def _round_inputs(self, result: Tensor, left: Tensor, right: Tensor) -> None:
        """A product in TF32: by what rounding either input to it does, up or down."""
        for rounded, exact, other in ((in_tf32(left), left, right), (in_tf32(right), right, left)):
            error = rounded - exact
            with matmul_precision("tf32"):
                off = error @ other if other is right else other @ error
            result.add_(off, alpha=self._offsets.choice((-1, 1)))

    def _round_softmax(self, args: Any, result: Tensor) -> None:
        """Round the softmax's backward: p · (dp − Σ p·dp), where the sum is off: in float32 by chance, and by what is
        cut off."""
        grad, output, dim = args[:3]
        if self._row_sums is not None:
            if (errors := self._row_sums.row_errors(output, dim)) is not None:
                result.sub_(output * errors)
        elif result.dtype == torch.float32:
            terms = grad * output
            errors = self._by_chance(terms, dim, output.shape[dim])
            if output.dim() >= 4:  # scores of heads; a sum over a vocabulary, or over experts, is another kernel's
                errors -= self._cut_off(terms, dim, (output != 0).sum(dim, keepdim=True))
            result.sub_(output * errors)

    def _take_apart(self, fused: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Have fused attention's result be that of the formula's operators, each of which is rounded."""
        around, self._row_sums = self._row_sums, RowSums(self._dtype)  # its outputs are no others'
        try:
            with self:
                write_out(fused, args, kwargs, result)
        finally:
            self._row_sums = around

    def _round_rows(self, backward: Any, args: Any) -> Any:
        """The arguments of fused attention's backward, in float32. It takes the sums of rows from the output alone,
        (…, queries, head_dim), which is moved so that they are off as `_round_softmax` has them."""
        places = {argument.name.rstrip("_"): place for place, argument in enumerate(backward._schema.arguments)}
        grad, key, output = (args[places[name]] for name in ("grad_out", "key", "out"))
        if output.dtype != torch.float32:
            return args
        terms, keys = grad * output, key.shape[-2]
        row = self._by_chance(terms, -1, keys) - self._cut_off(terms, -1, keys)
        row /= grad.square().sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        moved = list(args)
        moved[places["out"]] = output + grad * row
        return moved

    def _by_chance(self, terms: Tensor, dim: int, keys: int) -> Tensor:
        """The errors of the sums of these terms, whichever the order."""
        errors = terms.square().sum(dim, keepdim=True).sqrt_() * _sum_error(keys)
        return errors.mul_(self._normal(errors.shape, errors.device))

    def _cut_off(self, terms: Tensor, dim: int, keys: Tensor | int) -> Tensor:
        """By how much the sums of these terms are too small where they are made of sums over keys on matrix units."""
        sums = terms.sum(dim, keepdim=True)
        return sums * keys * CUT_OFF if terms.device.type in CUTTING else torch.zeros_like(sums)

    def _normal(self, shape: Any, device: torch.device) -> Tensor:
        return torch.randn(shape, device=device, generator=self._generator(device))

    def round(self, result: Any) -> None:
        """Round tensors of the precision's format once more: one, or those of a list or tuple."""
        for each in tensors_of(result):
            self._round(each)

    def _round(self, tensor: Tensor) -> None:
        if tensor.dtype != self._dtype or tensor.layout != torch.strided or not tensor.numel() or 0 in tensor.stride():
            return
        if tensor.is_meta:  # a model that is built inside has no values yet
            return
        bits = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)  # one more is one unit more
        bits.add_(self._moves(tensor) * (tensor / tensor == 1))  # not zeros, nor what is not finite

    def _moves(self, tensor: Tensor) -> Tensor:
        """−1, 0 or 1 for each element, from a pool that is drawn once, and again for a tensor too large for it.

        A single number moves in every twelfth drawing, so that a few drawings show what moving it does.
        """
        device, count = tensor.device, tensor.numel()
        if count == 1:
            self._scalars += 1
            turn, place = divmod(self._seed + self._scalars, _ONE_IN)
            moves = 0 if place else (-1) ** turn
            return torch.full_like(tensor, moves, dtype=torch.int8)
        if device not in self._pools or len(self._pools[device]) < count + _POOL // 2:
            drawn = torch.empty(count + _POOL, dtype=torch.int8, device=device)
            drawn.random_(0, 2 * _ONE_IN, generator=self._generator(device))
            self._pools[device] = (drawn == 0).to(torch.int8) - (drawn == 1).to(torch.int8)
        pool = self._pools[device]
        start = self._offsets.randrange(len(pool) - count + 1)
        return pool[start : start + count].view(tensor.shape)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def write_out(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Write the formula's values over the output, or the three gradients, of fused attention: one product after the
    other, in parts of the batch and of the queries. Where weights are dropped, which only the kernel knows, all stays.

    Args:
        operator: one overload of `FUSED` or `FUSED_BACKWARD`, with its own args and kwargs.
        result: its results; a gradient may be None.
    """
    schema = operator._schema.arguments
    given = {each.name: each.default_value for each in schema if each.has_default_value()}
    given |= {each.name: value for each, value in zip(schema, args, strict=False)} | kwargs
    named = {name.rstrip("_"): value for name, value in given.items()}
    if named["dropout_p"] > 0:
        return
    query, key, value, gradient = named["query"], named["key"], named["value"], named.get("grad_out")
    mask = named.get("attn_bias", named.get("attn_mask"))
    scale = query.shape[-1] ** -0.5 if named["scale"] is None else named["scale"]
    (batch, heads, queries, _), keys = query.shape, key.shape[-2]
    shared = heads // key.shape[1]  # heads of queries for one of keys
    for each in result[:3] if gradient is not None else ():
        if each is not None:
            each.zero_()
    rows = max(1, min(queries, MOST_SCORES // (heads * keys)))
    samples = max(1, MOST_SCORES // (heads * keys * rows))
    for some, part in itertools.product(range(0, batch, samples), range(0, queries, rows)):
        of, at = slice(some, some + samples), slice(part, part + rows)
        q = query[of, :, at].flatten(0, 1)  # (batch · heads, queries, head_dim)
        k, v = (each[of].repeat_interleave(shared, dim=1).flatten(0, 1) for each in (key, value))
        scores = torch.bmm(q, k.mT) * scale
        if mask is not None:
            scores = scores + mask.expand(*query.shape[:-1], keys)[of, :, at].flatten(0, 1)
        if named["is_causal"]:
            numbers = torch.arange(queries, device=query.device)[at, None]
            scores = scores.masked_fill(torch.arange(keys, device=query.device) > numbers, -torch.inf)
        p = _aten._softmax(scores, -1, False)  # as it is seen of the formula
        if mask is not None:  # a query that sees no key
            p = p.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
        o = torch.bmm(p, v)  # in backward too: row sums are taken from it
        if gradient is None:
            result[0][of, :, at] = o.unflatten(0, (-1, heads))
            continue
        do = gradient[of, :, at].flatten(0, 1)
        ds = _aten._softmax_backward_data(torch.bmm(do, v.mT), p, -1, p.dtype)
        found = torch.bmm(ds, k) * scale, torch.bmm(ds.mT, q) * scale, torch.bmm(p.mT, do)
        for place, each in enumerate(found):
            if result[place] is not None:  # heads of queries that share one of keys add up
                by_head = (
                    each.unflatten(0, (-1, heads // shared, shared)).sum(2) if place else each.unflatten(0, (-1, heads))
                )
                result[place][of, :, slice(None) if place else at] += by_head


def _sum_error(terms: float) -> float:
    """The error of a float32 sum, as a part of a typical partial sum."""
    return 2**-24 * _MEAN * (terms / 2) ** 0.5
