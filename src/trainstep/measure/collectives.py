"""Collectives that a step starts, and how many bytes each is given.

Every call of torch.distributed goes through torch's dispatcher, where a mode sees it, in backward's threads too. Copies
between GPUs and our calls over Gloo announce themselves there. Counted is the payload: the full tensors that are
reduced, gathered or sent, not what an algorithm makes of it on the wire (`plan.communication` says that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMES = (
    *("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "broadcast", "reduce", "gather", "scatter"),
    *("barrier", "send", "receive"),
)
_NO_CALLS = ("wait_tensor", "_wrap_tensor")  # operators of the same namespaces that start nothing


@dataclass(frozen=True)
class Collective:
    name: str  # all-reduce, all-gather, reduce-scatter, broadcast, …
    tensors: int  # full tensors in the call
    bytes: int  # their size: of what is reduced or sent; for an all-gather, of what comes out
    dtype: torch.dtype | None
    ranks: int | None = None  # of the group that makes the call


Follow = Callable[[torch.device], Callable[[dist.Work | None], object] | None]
"""Called when a call over tensors of a device begins. What it returns, if anything, is given the call's work: None if
the call runs in the current stream and nothing is to be waited for."""


@contextmanager
def recorded_collectives(follow: Follow = lambda device: None) -> Iterator[list[Collective]]:
    """The collectives started inside the block, in order; `follow` sees those that torch carries out."""
    with _Recorder(follow) as recorder:
        yield recorder.calls


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True  # compiled code that computes attention again has some

    def __init__(self, follow: Follow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []
        self._follow = follow

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True if torch may compile under this mode; else code that insists on being compiled raises."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", None) in ("c10d", "_c10d_functional", "trainstep_exchanges"):
            operator = func._schema.name.partition("::")[2]
            if not operator.startswith(_NO_CALLS):
                self.calls.append(_collective(operator, args))
                if func.namespace == "c10d":
                    return self._followed(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = next((leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), torch.device("cpu"))
        told = self._follow(device)
        result = func(*args, **kwargs)
        works = [each for each in tree_leaves(result) if isinstance(each, torch.ScriptObject)]
        if told is not None:
            for each in works:
                told(dist.Work.unbox(each))
        return result


def _collective(operator: str, args: tuple[Any, ...]) -> Collective:
    """`_allgather_base_` → all-gather. The payload is the larger of outputs and inputs, the first two arguments."""
    bare = operator.replace("_", "").replace("recv", "receive")
    name = max((name for name in _NAMES if bare.startswith(name.replace("-", ""))), key=len, default=operator)
    lists = [[leaf for leaf in tree_leaves(argument) if isinstance(leaf, Tensor)] for argument in args[:2]]
    payload = max(lists, key=lambda tensors: sum(each.nbytes for each in tensors))
    size = sum(each.nbytes for each in payload)
    return Collective(name, len(payload), size, payload[0].dtype if payload else None, _ranks(args))


def _ranks(args: tuple[Any, ...]) -> int | None:
    """The size of the group: it is among the arguments, or its name is the last one, or (announced) its size."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and each._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
            return dist.ProcessGroup.unbox(each).size()
    if isinstance(args[-1], str):
        group: dist.ProcessGroup = distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined,arg-type]
        return group.size()
    return args[-1] if isinstance(args[-1], int) else None
