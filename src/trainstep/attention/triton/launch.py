"""Launching a kernel again without examining every argument again.

Triton finds a compiled kernel by the type, alignment and value of each argument of each call. With the 20 to 35
arguments of these kernels that takes longer than attention over a short sequence. What those properties follow from,
the tensors' shapes, strides, dtypes and alignment, is quicker to compare: a call that agrees in it with an earlier one
is given that one's compiled kernel, and of its arguments only the tensors are replaced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_REMEMBERED = 1024  # launches per kernel; beyond it, all are forgotten and prepared again


class Arguments:
    """What a kernel is launched with: `programs` of them, its leading arguments in order, the compile-time ones and the
    compiler's options by name."""

    def __init__(self, programs: int, *leading: Any, **named: Any) -> None:
        self.programs, self.leading, self.named = programs, leading, named


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A compiled kernel and the arguments of one launch, with places where tensors go."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    tensors: tuple[tuple[int, int], ...]  # (position among the arguments, which tensor)
    descriptors: tuple[tuple[int, int], ...]  # the same, for descriptors of tensors


class Launcher:
    """`launcher(tensors, *settings)` launches `kernel` with `arguments(*tensors, *settings)`.

    What `arguments` returns may depend on the tensors' shapes, strides, dtypes and device and on the settings, which
    are hashable, and on nothing else. Its leading arguments are the tensors, descriptors of them, and numbers.
    """

    def __init__(self, kernel: Any, arguments: Callable[..., Arguments]) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._prepared: dict[Any, _Prepared] = {}
        self.latest: Any = None
        """The kernel compiled last, with what the compiler said of it (`n_spills`, `n_regs`)."""

    def __call__(self, tensors: Sequence[Tensor], *settings: Any) -> None:
        key = (
            tensors[0].device,
            settings,
            *((t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors),
        )
        prepared = self._prepared.get(key)
        if prepared is None:
            self._first(key, tensors, settings)
            return
        arguments = list(prepared.arguments)
        for position, which in prepared.tensors:
            arguments[position] = tensors[which]
        for position, which in prepared.descriptors:
            arguments[position] = _over(arguments[position], tensors[which])
        prepared.compiled[prepared.grid](*arguments)

    def _first(self, key: Any, tensors: Sequence[Tensor], settings: tuple[Any, ...]) -> None:
        tensors = [t.detach() for t in tensors]  # told apart below, also where a caller passes one tensor twice
        launch = self._arguments(*tensors, *settings)
        grid = (launch.programs, 1, 1)
        compiled = self._kernel[grid](*launch.leading, **launch.named)
        if compiled is None:  # Triton's interpreter has nothing to remember
            return
        self.latest = compiled
        if len(self._prepared) >= _REMEMBERED:
            self._prepared.clear()
        arguments = [*launch.leading, *(launch.named[name] for name in self._kernel.arg_names[len(launch.leading) :])]
        places: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for position, argument in enumerate(arguments):
            is_descriptor = hasattr(argument, "base")
            tensor = argument.base if is_descriptor else argument
            if isinstance(tensor, Tensor):
                which = next(index for index, candidate in enumerate(tensors) if candidate is tensor)
                places[is_descriptor].append((position, which))
                arguments[position] = _over(argument, None) if is_descriptor else None  # keep no memory alive
        self._prepared[key] = _Prepared(compiled, grid, tuple(arguments), tuple(places[False]), tuple(places[True]))


def _over(descriptor: Any, tensor: Tensor | None) -> Any:
    """`descriptor` with another tensor of the same kind; its checks have passed once and are not repeated."""
    copy = object.__new__(type(descriptor))
    copy.__dict__ = {**descriptor.__dict__, "base": tensor}
    return copy
