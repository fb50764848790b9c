"""Peak memory of a step, by phase. On a GPU from the caching allocator; on a CPU from every storage torch makes.

The GPU figure is `max_memory_allocated`: bytes in live tensors, not what the allocator keeps cached. The CPU has no
such counter, so an untimed step is run under `LiveStorages`; there the peak of compiled code, which allocates outside
the dispatcher, is unknown.

And what forward keeps for backward (its residuals): bytes by module and by operation, each storage counted once.
Autograd passes every tensor it saves through a pack hook. The one here notes the tensor's storage and the innermost
module that is running. When forward is done, what still lives is what is kept, and a walk over the graph finds which
node, that is which operation, holds it. A small view keeps its whole storage alive, so storages are counted, not views,
each for the first that saved it. Parameters, buffers and the batch are there without backward and count nothing; casts
of parameters (the half-precision weights of autocast) do count, under a name of their own. Selective checkpointing
keeps results without telling autograd: those are not seen here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from trainstep.base.config import PhaseContext

GIB = 2**30
MIB = 2**20
WEIGHT_CAST = "cast of a parameter"  # the operation under which casts of parameters are listed
CHECKPOINT = "checkpoint"
"""The operation under which inputs of checkpointed segments are listed: no node of the graph holds them."""
_CASTS_AND_VIEWS = ("ToCopyBackward", "TBackward", "TransposeBackward", "ViewBackward", "PermuteBackward")

_TAKES_WHAT_PYTHON_MADE = (torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default)  # `torch.tensor` calls them


@dataclass(slots=True, eq=False)
class StorageLife:
    """Life of one storage, in states: the first is 0, and every making and every release of one begins another."""

    bytes: int
    start: int  # 0 if the storage was there before
    end: int | None = None  # the first state without it; None while it lives
    is_found: bool = False  # whether an operator was given it though it was neither resident nor made by an operator


class LiveStorages(TorchDispatchMode):
    """Follows every storage on a CPU from the operator that returned it to its release, while entered; views add none.

    A storage that an operator is given and none has made was there before, such as state that an optimizer keeps out of
    sight: it is followed too, but not in `bytes` or `peak`. Eager code only. `on_new` is called with each storage when
    it is first seen, `resident` ones (there before) included.
    """

    def __init__(
        self,
        resident: Iterable[Tensor] = (),
        on_new: Callable[[StorageLife, torch.UntypedStorage], object] = lambda life, storage: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.events = 0  # storages made plus storages released so far: the number of the present state
        self._on_new = on_new
        self._lives: weakref.WeakKeyDictionary[torch.UntypedStorage, StorageLife] = weakref.WeakKeyDictionary()
        self._is_over = False
        for tensor in resident:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TAKES_WHAT_PYTHON_MADE:
            for value in tree_leaves((args, kwargs)):
                self._follow(value, is_found=True)
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            self._follow(value, is_made=True)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._is_over = True

    @property
    def found_bytes(self) -> int:
        """Bytes of the found storages that are alive now."""
        return sum(life.bytes for life in self._lives.values() if life.is_found)

    def lives_of(self, value: object) -> list[StorageLife]:
        """The lives of a tensor's storages, as far as they are followed."""
        return [self._lives[storage] for storage in storages_of(value) if storage in self._lives]

    def _follow(self, value: object, *, is_made: bool = False, is_found: bool = False) -> None:
        for storage in storages_of(value):
            if storage in self._lives or storage.nbytes() == 0:
                continue
            self.events += is_made
            life = StorageLife(storage.nbytes(), self.events if is_made else 0, is_found=is_found)
            self._lives[storage] = life
            if not is_found:
                self.bytes += life.bytes
                self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._release, life).atexit = False
            self._on_new(life, storage)

    def _release(self, life: StorageLife) -> None:
        if not self._is_over:
            self.events += 1
            life.end = self.events
            self.bytes -= 0 if life.is_found else life.bytes


def storages_of(value: object) -> list[torch.UntypedStorage]:
    """Storages of a tensor's elements: one storage, or those of a sparse tensor's indices and values, or of the tensors
    inside a wrapper such as DTensor; else none."""
    if not isinstance(value, Tensor):
        return []
    wrapper: Any = value
    if is_traceable_wrapper_subclass(wrapper):
        inner = wrapper.__tensor_flatten__()[0]
        return [storage for name in inner for storage in storages_of(getattr(wrapper, name))]
    if hasattr(value, "to_local"):  # of parameters of FullyShardedDataParallel
        return storages_of(value.to_local())
    if value.layout == torch.sparse_coo:
        return [*storages_of(value._indices()), *storages_of(value._values())]
    return [value.untyped_storage()]


@dataclass(frozen=True)
class MemoryPeaks:
    """Bytes in live tensors."""

    before: int  # at rest, before the step. On a CPU with found storages that outlive the step
    peak: int  # the most during the step
    by_phase: dict[str, int]  # the most during each phase
    after: dict[str, int]  # at the end of each phase
    is_uncompiled: bool = False  # whether code that is compiled otherwise ran eagerly, to be followed
    cache: int = 0  # of a key-value cache that forward returned


def cache_bytes(outputs: Any) -> int:
    """Bytes of the key-value cache in a model's outputs, as transformers' models return it (`past_key_values`)."""
    cache = (
        outputs.get("past_key_values") if isinstance(outputs, Mapping) else getattr(outputs, "past_key_values", None)
    )
    ahead, seen = [cache], set()
    found: dict[int, int] = {}
    while ahead:
        each = ahead.pop()
        found |= {storage.data_ptr(): storage.nbytes() for storage in storages_of(each)}
        if isinstance(each, (Tensor, nn.Module)) or id(each) in seen:
            continue
        seen.add(id(each))
        inside = each.values() if isinstance(each, Mapping) else each if isinstance(each, (list, tuple)) else ()
        ahead += [*inside, *getattr(each, "__dict__", {}).values()]
    return sum(found.values())


def step_memory(
    step: Callable[[PhaseContext], object], device: torch.device, resident: Iterable[Tensor]
) -> MemoryPeaks:
    """Run `step` once, as `measure.timing.time_steps` does, and return its peaks.

    On a CPU `resident` are the tensors alive before the step: parameters, optimizer state, the batch.
    """
    by_phase: dict[str, int] = {}
    after: dict[str, int] = {}
    live = None if device.type == "cuda" else LiveStorages(resident)

    def held() -> int:
        return torch.cuda.memory_allocated(device) if live is None else live.bytes

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        if live is None:
            torch.cuda.reset_peak_memory_stats(device)
        else:
            live.peak = live.bytes
        yield
        by_phase[name] = torch.cuda.max_memory_allocated(device) if live is None else live.peak
        after[name] = held()

    if live is None:
        torch.cuda.synchronize(device)
    before = held()
    with live or nullcontext():
        step(phase)
    found = 0 if live is None else live.found_bytes
    by_phase, after = ({name: size + found for name, size in sizes.items()} for sizes in (by_phase, after))
    return MemoryPeaks(before + found, max(by_phase.values()), by_phase, after)


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())


@dataclass(frozen=True)
class Residual:
    """A storage that is saved for backward."""

    module: str  # dotted name of the innermost module that was running; empty for the root, or outside of all modules
    operation: str  # the operation whose backward needs it, as autograd names it, such as `Softmax`
    shape: tuple[int, ...]  # of the first view of it that was saved
    dtype: torch.dtype
    bytes: int  # of the whole storage


@dataclass(frozen=True)
class Residuals:
    kept: tuple[Residual, ...]  # in the order in which it was saved

    @property
    def bytes(self) -> int:
        return sum(residual.bytes for residual in self.kept)


class _Packed:
    def __init__(self, tensor: Tensor, module: str) -> None:
        self.tensor = tensor.detach()  # with its graph, a saved output would keep itself alive in a circle
        self.module = module
        self.casts_parameter = casts_parameter(tensor)


def residuals(
    forward: Callable[[], Any], module: nn.Module | None = None, resident: Iterable[Tensor] = ()
) -> tuple[Residuals, Any]:
    """Run `forward` and return what its results keep for backward, and the results, still differentiable.

    Args:
        forward: what is kept is what the graphs of the tensors that it returns hold.
        module: names submodules; its parameters and buffers are left out. None for compiled code, which has no modules
            left: its parameters belong into `resident`.
        resident: further tensors that are alive anyway, such as the batch.
    """
    alive = [*resident, *(() if module is None else (*module.parameters(), *module.buffers()))]
    seen = {storage.data_ptr() for tensor in alive for storage in storages_of(tensor)}
    running: list[str] = []
    packed: list[weakref.ref[_Packed]] = []

    def pack(tensor: Tensor) -> _Packed:
        each = _Packed(tensor, running[-1] if running else "")
        packed.append(weakref.ref(each))
        return each

    uncompiled = torch.compiler.disable(pack)  # or a compiled forward would compile it too, for every shape anew
    with (
        torch.autograd.graph.saved_tensors_hooks(uncompiled, lambda each: each.tensor),
        nullcontext() if module is None else module_calls(module.named_modules(), running.append, running.pop),
    ):
        results = forward()
    holders = {id(each): operation_name(node.name()) for node in graph_nodes(results) for each in _packed_by(node)}
    kept = []
    for each in filter(None, (reference() for reference in packed)):
        operation = WEIGHT_CAST if each.casts_parameter else holders.get(id(each), CHECKPOINT)
        for storage in storages_of(each.tensor):
            if storage.data_ptr() not in seen and storage.nbytes() > 0:
                seen.add(storage.data_ptr())
                shape = tuple(each.tensor.shape)
                kept.append(Residual(each.module, operation, shape, each.tensor.dtype, storage.nbytes()))
    return Residuals(tuple(kept)), results


def _packed_by(node: Any) -> Iterator[_Packed]:
    for attribute in (each for each in dir(node) if each.startswith("_raw_saved_")):
        for saved in tree_leaves(getattr(node, attribute)):
            if isinstance(saved.data, _Packed):
                yield saved.data


@contextmanager
def module_calls(
    modules: Iterable[tuple[str, nn.Module]], enter: Callable[[str], None], leave: Callable[[], object]
) -> Iterator[None]:
    """While entered, `enter(name)` runs before and `leave()` after every call of each of the modules."""

    def after(*_: object) -> None:  # what a hook returns would take the place of the result
        leave()

    with ExitStack() as stack:
        for name, each in modules:
            before = each.register_forward_pre_hook(lambda *_, name=name: enter(name), prepend=True)
            stack.callback(before.remove)
            stack.callback(each.register_forward_hook(after, always_call=True).remove)
        yield


def graph_nodes(results: Any) -> Iterator[Any]:
    """Every node of the autograd graphs behind the tensors in `results`, each once."""
    ahead: list[Any] = [leaf.grad_fn for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    visited: set[Any] = {None}
    while ahead:
        node = ahead.pop()
        if node not in visited:
            visited.add(node)
            yield node
            ahead += [following for following, _ in node.next_functions]


def operation_name(node_name: str) -> str:
    """`SoftmaxBackward0` → `Softmax`, `torch::autograd::CopySlices` → `CopySlices`."""
    name = node_name.rpartition("::")[2].rstrip("0123456789")
    return name.removesuffix("Backward") or name


def casts_parameter(tensor: Tensor) -> bool:
    """True if the tensor is a parameter that was only cast or viewed since."""
    node, casts = tensor.grad_fn, False
    while node is not None and node.name().rstrip("0123456789") in _CASTS_AND_VIEWS:
        casts |= node.name().startswith("ToCopy")
        node = node.next_functions[0][0]
    return casts and isinstance(getattr(node, "variable", None), nn.Parameter)


def residual_stream_bytes(batch: int, context: int, d_model: int, element_bytes: int) -> int:
    """Bytes of one residual stream: batch · context · d_model elements."""
    return batch * context * d_model * element_bytes
