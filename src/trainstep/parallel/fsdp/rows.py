"""This rank's rows of a parameter or a gradient, in the shape of the whole.

Code that knows nothing of sharding (an initialisation, an average of weights, a loop that updates by hand) computes
with the tensors it is given. So these have the whole's shape, and every function of them comes here first:

- A function that treats each element alone runs on the rows. A plain tensor of the whole's shape takes part with the
  same rows of it. The result is again rows of a whole.
- A function that fills with random numbers draws the whole on every rank, and each keeps its rows of the first rank's
  numbers. So the values and the generator's end state are those of one process.
- Every other function raises, also one that is not known. From the rows alone each rank would get another result.

Of a replicated parameter every rank has the whole: nothing raises, and random numbers are the first rank's, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat, zip_longest
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from trainstep.base.errors import UsageError
from trainstep.parallel.partial import StandIn, changes, name_of


@dataclass(frozen=True, eq=False)
class Sharing:
    """Common to all rows of one wrapper.

    Attributes:
        group: all ranks.
        from_first: gives tensors the first rank's values. All ranks call it.
        is_waiting: says whether gradients came that are not averaged yet.
        hooked: the names of parameters that were given hooks.
    """

    group: dist.ProcessGroup | None
    from_first: Callable[[Sequence[Tensor]], None]
    is_waiting: Callable[[], bool]
    hooked: set[str]


class RankRows(StandIn):
    """Values that were made from a parameter.

    Attributes:
        plain: the rows, a plain tensor.
        rows: their place in the whole; None if every rank has all of it.
    """

    plain: Tensor
    rows: slice | None
    sharing: Sharing
    _label: str = "a sharded parameter's values"
    _instead: ClassVar[str] = (
        "Compute with the whole, from gather_full_parameters() of FullyShardedDataParallel. Of a whole tensor, copy_() "
        "into a parameter takes this rank's rows"
    )

    is_sparse = False  # see `of`

    @classmethod
    def of(
        cls,
        plain: Tensor,
        shape: torch.Size,
        rows: slice | None,
        sharing: Sharing,
        *,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """Rows of a whole of this shape.

        Torch would let a plain tensor take over the memory of a dense one, as by `other.data = this`, and then read
        where there is none. Of a sparse one, which no `layout` says it is, that is an error.
        """
        made = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=dtype or plain.dtype,
            device=plain.device,
            requires_grad=requires_grad,
            layout=torch.sparse_coo,
            dispatch_layout=True,
        )
        made.plain, made.rows, made.sharing = plain, rows, sharing
        return made

    @classmethod
    def use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what, is_set = name_of(func), func.__name__ == "__set__"
        in_init = getattr(func, "__module__", None) == "torch.nn.init"  # where gradients are off, but not yet here
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad() if in_init else nullcontext():
            if what == "requires_grad_" or (what in ("requires_grad", "grad") and func.__name__ != what):
                return func(*args, **kwargs)  # of this tensor itself
            first = _first(_pytree.tree_leaves((args, kwargs)))
            if args and not isinstance(args[0], RankRows) and what in _AS:
                like = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
                return func(args[0], like, *args[2:], **kwargs)
            if what == "data" and is_set:
                return _put(args[0], args[1])
            if what == "layout":
                return torch.strided
            if what == "__reduce_ex__":
                return args[0].plain.__reduce_ex__(args[1])
            if what == "__deepcopy__":
                return _like(args[0], args[0].plain.detach().clone(), what)
            if what in _FILLS or what in _DRAWS:
                return _drawn(first, what, func, args, kwargs)
            if what in _RESHAPES and first.rows is not None:
                return _reshaped(first, what, func, args, kwargs)
            if _is_local(func) and "out" not in kwargs:
                return _elementwise(what, func, args, kwargs)
            if first.rows is not None or _is_random(func):
                first.refuse(what)
            args, kwargs = _pytree.tree_map_only(RankRows, lambda each: each.plain, (args, kwargs))
            return func(*args, **kwargs)

    def to_local(self) -> Tensor:
        """The rows alone; they share memory."""
        return self.plain.detach()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return self.plain.is_contiguous(*args, **kwargs)

    def refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} of {self._label}: a rank has only its rows of it, so each rank would get another result. "
            f"{self._instead}. The rows alone are its to_local()"
        )


class RankGradient(RankRows):
    """A gradient, or what was made from one. It is not changed before all gradients are there."""

    _label = "a sharded parameter's gradient"
    _instead = "Clip with clip_grad_norm_ of FullyShardedDataParallel, which takes the norm over all ranks"

    @classmethod
    def use(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        what = name_of(func)
        sharing = _first(_pytree.tree_leaves((args, kwargs))).sharing
        if changes(what) and what != "requires_grad_" and sharing.is_waiting():
            raise UsageError(
                f"{what} on a gradient before finish_gradient_synchronization(): other gradients are still "
                "on their way and would be left out; call it first"
            )
        result = super().use(func, args, kwargs)
        if what == _OVERFLOW_CHECK:  # one rank's rows may overflow alone: then no rank may step
            dist.all_reduce(args[1], op=dist.ReduceOp.MAX, group=sharing.group)
        return result


def _first(values: Iterable[Any]) -> Any:
    """The first that is divided, else the first of which every rank has the whole, else None."""
    found = [each for each in values if isinstance(each, RankRows)]
    return next((each for each in found if each.rows is not None), next(iter(found), None))


def _like(first: RankRows, plain: Tensor, what: str) -> Any:
    """Rows that `what` made of others, in the same place of a whole."""
    shape = plain.shape
    if first.rows is not None:
        if plain.dim() < 2 or len(plain) != len(first.plain):
            first.refuse(what)
        shape = torch.Size((len(first), *shape[1:]))
    kind = RankGradient if isinstance(first, RankGradient) else RankRows
    return kind.of(plain, shape, first.rows, first.sharing)


def beside(first: RankRows, value: Any, what: str, *, is_written: bool = False) -> Any:
    """Value that takes part beside the rows where `value` would take part beside the whole."""
    if isinstance(value, RankRows):
        if value.rows is not None and (value.rows, len(value), value.dim()) != (first.rows, len(first), first.dim()):
            value.refuse(f"{what} with other rows")
        if value.rows is not None or is_written:
            return value.plain
        value = value.plain
    if first.rows is None or not isinstance(value, Tensor) or value.dim() < first.dim():
        return value
    if value.dim() > first.dim():
        first.refuse(f"{what} with a tensor of shape {tuple(value.shape)}")
    if len(value) != len(first):
        return value
    if is_written:
        first.refuse(f"{what} into a whole tensor")
    return value[first.rows]


def _elementwise(what: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that treats each element alone; one of lists is such a function of each position in them."""
    values, of_lists = [*args, *kwargs.values()], what.startswith(_OF_LISTS)
    lists = [each for each in values if isinstance(each, (list, tuple))] if of_lists else [values]
    columns = zip_longest(*lists) if of_lists else [values]
    firsts, known = [_first(column) for column in columns], {}

    def one(first: RankRows | None, value: Any, is_written: bool) -> Any:
        local = value if first is None else beside(first, value, what, is_written=is_written)
        known[id(local)] = value
        return local

    def local(value: Any, is_written: bool) -> Any:
        if not of_lists:
            return one(firsts[0], value, is_written)
        if not isinstance(value, (list, tuple)):
            if isinstance(value, RankRows) and value.rows is not None:
                value.refuse(what)
            return value.plain if isinstance(value, RankRows) else value
        return [one(first, each, is_written) for first, each in zip(firsts, value, strict=False)]

    def given(first: RankRows | None, value: Any) -> Any:
        """Value that is given back for a result: an argument itself if that was changed in place."""
        if first is None or not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else _like(first, value, what)

    in_place = changes(what)
    args = tuple(local(each, in_place and (i == 0 or "_fused_" in what)) for i, each in enumerate(args))
    result = func(*args, **{key: local(each, False) for key, each in kwargs.items()})
    if not isinstance(result, (list, tuple)):
        return given(firsts[0], result)
    return [given(first, each) for first, each in zip(firsts if of_lists else repeat(firsts[0]), result, strict=False)]


def _drawn(
    first: RankRows, what: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RankRows:
    """Fill with random numbers: those of the whole, drawn as one process draws them."""
    if any(isinstance(each, Tensor) and each is not first for each in _pytree.tree_leaves((args, kwargs))):
        first.refuse(f"{what} with a tensor")
    whole = torch.empty(first.shape, dtype=first.plain.dtype, device=first.plain.device)
    args, kwargs = _pytree.tree_map_only(RankRows, lambda _: whole, (args, kwargs))
    drawn = func(*args, **kwargs)
    first.sharing.from_first([drawn])
    own = drawn if first.rows is None else drawn[first.rows]
    if what in _DRAWS:
        return cast(RankRows, _like(first, own.clone(), what))
    first.plain.copy_(own)
    return first


def _reshaped(
    first: RankRows, what: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Another shape with the same rows."""
    meta = torch.empty(first.shape, dtype=first.dtype, device="meta")
    args, kwargs = _pytree.tree_map_only(RankRows, lambda each: meta.new_empty(each.shape), (args, kwargs))
    made = func(*args, **kwargs)
    if made.dim() < 2 or len(made) != len(first) or made.dtype != first.dtype:
        first.refuse(what)
    return _like(first, first.plain.reshape(len(first.plain), *made.shape[1:]), what)


def _put(first: RankRows, value: Any) -> None:
    """Take over the values of a tensor that is assigned to `data`."""
    local = beside(first, value, "data")
    if not isinstance(local, Tensor) or local.shape != first.plain.shape:
        raise UsageError(f"data of {first._label} was set to {_words(value)}; expected shape {tuple(first.shape)}")
    if (local.dtype, local.device) != (first.plain.dtype, first.plain.device):
        raise moved_or_cast()
    first.plain.data.copy_(local)


def moved_or_cast() -> UsageError:
    return UsageError(
        "a sharded module was moved or cast; give FullyShardedDataParallel device= or compute_dtype= instead"
    )


def frozen(name: str, requires_grad: bool) -> UsageError:
    """Error for a parameter whose `requires_grad` was changed to this value."""
    return UsageError(
        f"requires_grad of {name} was {not requires_grad} when it was sharded and is {requires_grad} now; freeze or "
        "unfreeze before FullyShardedDataParallel is built"
    )


def _words(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


_OVERFLOW_CHECK = "_amp_foreach_non_finite_check_and_unscale_"
_OF_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
_FILLS = frozenset(
    [
        *("normal_", "uniform_", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "random_"),
        "kaiming_uniform_",  # torch.nn.init calls it itself, of a tensor like these
    ]
)
_DRAWS = frozenset(["rand_like", "randn_like", "randint_like"])
_AS = frozenset(["to", "type_as", "view_as", "reshape_as", "expand_as"])  # take a shape, a dtype or a device of rows
_RESHAPES = frozenset(["view", "reshape", "view_as", "reshape_as", "flatten", "unflatten"])
_LOCAL = frozenset(
    [
        *("detach", "detach_", "clone", "contiguous", "copy_", "zero_", "fill_", "constant_"),
        *("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16", "_to_copy"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "_foreach_zero_", "_foreach_copy_"),
        *("record_stream", _OVERFLOW_CHECK),
        *_RESHAPES,
    ]
)
"""Besides arithmetic, what mixes no elements."""


@functools.cache
def _is_local(func: Callable[..., Any]) -> bool:
    """True if each element of the result depends on the elements in its own place."""
    name = name_of(func)
    if name in _LOCAL or name.startswith("_fused_") or (name == "data" and func.__name__ == "__get__"):
        return True
    name = _OPERATORS.get(name, name).removeprefix("_foreach_").rstrip("_")
    if name in ("max", "min") or _is_random(func):  # max and min are elementwise of two tensors, and of one a reduction
        return False
    return _has_tag(name, torch.Tag.pointwise) and not _has_tag(name, torch.Tag.data_dependent_output)


@functools.cache
def _is_random(func: Callable[..., Any]) -> bool:
    return _has_tag(name_of(func), torch.Tag.nondeterministic_seeded)


def _has_tag(name: str, tag: torch.Tag) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(tag in getattr(packet, each).tags for each in packet.overloads())


_OPERATORS = {f"__{start}{sign}__": sign for sign in ("add", "sub", "mul", "pow") for start in ("", "r", "i")}
_OPERATORS |= {f"__{start}{sign}__": "div" for sign in ("truediv", "div") for start in ("", "r", "i")}
_OPERATORS |= {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__invert__": "bitwise_not"}
