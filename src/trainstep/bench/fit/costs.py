"""Weights of a block's activations, and costs of computing them again; measured on the block alone.

A forward pass of the model without gradients, which needs little memory, brings each block the inputs that it has in
training. Alike blocks (of one class, with the same shapes) are measured once, on the spot, with gradients:

- Every operator is seen with its results and its time. Those that run before the last tensor is saved are computed
  again where the block is: torch stops there.
- Every storage that is saved for backward is counted, as `trainstep.checkpointing.offloading` counts them.
- Forward and backward are timed in turns: with nothing computed again, with everything, and with the results of
  products kept. The first two tell what computing again costs; operators' times say which results save how much of it,
  and the third what picking results out costs beyond that.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.keeping import can_be_kept, is_product, operator_name
from trainstep.checkpointing.offloading import SavedStorages
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.checkpointing.repeating import Block, Repeated
from trainstep.measure.memory import LiveStorages, casts_parameter, storages_of
from trainstep.measure.timing import DeviceClock, device_clock, quiet_clock
from trainstep.plan.fit import BlockCost, Result, Stored
from trainstep.step.batches import map_tensors, tensors_of
from trainstep.step.blocks import find_blocks
from trainstep.step.training_step import build_step, uncompiled
from trainstep.step.workload import WorkloadSource

LEAST_SHARE = 0.01
"""Share of what a block saves: results and storages smaller than this are not chosen one by one."""
MOST_RESULTS = 12
"""Number of a block's results that are chosen, those with the most time saved for their bytes."""
ROUNDS, CALLS = 5, 3
"""Number of times that forward and backward are timed in turns, and of calls that follow one another in each."""
AGAIN = BlockPolicy(recompute=True)


def block_costs(source: WorkloadSource, config: StepConfig) -> tuple[BlockCost, ...]:
    """Costs of every block, in the order of forward.

    Raises:
        UnsupportedError: no blocks, a block that is called several times or never, or compiled as a whole or with
            "blocks-recompute".
    """
    if config.compile == "blocks-recompute":
        raise UnsupportedError(
            "with blocks-recompute the compiler chooses what is computed again; use --compile blocks or off"
        )
    if config.compile == "model":
        raise UnsupportedError(
            "what a block keeps is not seen in a model compiled as a whole; use --compile blocks or off"
        )
    step = build_step(source, dataclasses.replace(config, checkpointing="none", compile="off"))
    blocks = find_blocks(step.module)
    if not blocks:
        raise UnsupportedError(f"{source.name} has no blocks in an nn.ModuleList, so nothing to choose for each")
    names = {block: name for name, block in step.module.named_modules()}
    found: dict[Any, BlockCost] = {}
    order: list[BlockCost] = []
    called: set[nn.Module] = set()

    def measured(block: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's call as the model makes it; afterwards, where the block is the first of its kind, many more."""
        if block in called:
            raise UnsupportedError(
                f"{names[block]} is called several times in a step, so what it keeps is not its own; use "
                "--checkpointing every-1 or selective"
            )
        called.add(block)
        key = _kind_of(block, args, kwargs)
        if key in found:
            result = function(*args, **kwargs)
        else:
            wrapper = block.__dict__["forward"]
            _set(block, (before[block], None))  # it is called here without us, and compiled
            alone = _Alone(names[block], block, args, kwargs, step.module, config)
            result = alone.first(function)
            with torch.enable_grad():
                found[key] = alone.cost()
            _set(block, (wrapper, None))
        order.append(dataclasses.replace(found[key], name=names[block]))
        return result

    before = {block: block.__dict__.get("forward") for block in blocks}
    for block in blocks:
        block.__dict__["forward"] = partial(measured, block, block.forward)
    batch = step.next_batch()
    with torch.no_grad(), uncompiled():
        step.differentiable_loss(batch)
    if missing := [names[block] for block in blocks if block not in called]:
        raise UnsupportedError(f"{missing[0]} was not called in a step; use --checkpointing every-1 or selective")
    return tuple(order)


def _kind_of(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Properties that alike blocks have in common."""
    weights = tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in block.named_parameters())
    return type(block), weights, tuple((each.shape, each.dtype) for each in tensors_of((args, kwargs)))


class _Stack(nn.Module):
    """A block as a model, for `Checkpointing`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])


def _differentiable(result: Any) -> list[Tensor]:
    """The tensors that backward starts from."""
    return [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]


def _set(block: nn.Module, form: tuple[Any, Any]) -> None:
    """Give a block a `forward` of its own, or none, and what it was compiled to."""
    if form[0] is None:
        block.__dict__.pop("forward", None)
    else:
        block.__dict__["forward"] = form[0]
    block._compiled_call_impl = form[1]


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A storage that a call of the block saves."""

    number: int
    bytes: int
    is_input: bool
    is_cast: bool


class _Alone:
    """A block with its inputs, called by itself."""

    def __init__(
        self, name: str, block: nn.Module, args: Any, kwargs: Any, module: nn.Module, config: StepConfig
    ) -> None:
        self._name, self._block, self._config = name, block, config
        self._args, self._kwargs = args, kwargs
        self._input = next((each for each in tensors_of((args, kwargs)) if each.is_floating_point()), None)
        if self._input is None:
            raise UnsupportedError(
                f"{name} gets no floating-point tensor, so it has no input to be computed again from"
            )
        self._device = self._input.device
        self._clock, self._now = device_clock(self._device), quiet_clock(self._device)
        self._resident = [*module.parameters(), *module.buffers(), *tensors_of((args, kwargs))]
        self._forms: dict[Any, Any] = {}
        self._first, self._again = Repeated(Block(name, block), args, kwargs, None, lambda name: None).contexts()

    def first(self, function: Callable[..., Any]) -> Any:
        """The model's own call, after which caches and the like are as the model has them; others put them back."""
        with self._first:
            return function(*self._args, **self._kwargs)

    def cost(self) -> BlockCost:
        saved = self._saved(None)
        plain_bytes = sum(each.bytes for each in saved)
        operators = self._operators()
        total = sum(each.seconds for each, _ in operators)
        products = tuple(each.name for each, is_product in operators if is_product and each.bytes)
        keeping = BlockPolicy(True, products) if products else AGAIN
        plain_s, again_s, keeping_s = self._seconds([None, AGAIN, keeping])
        forward_s = self._forward_seconds()
        added = max(0.0, again_s - plain_s)
        scale = added / total if total else 0.0
        kept_s = scale * sum(each.seconds for each, is_product in operators if is_product)
        results = [
            dataclasses.replace(each, seconds=each.seconds * scale)
            for each, is_product in operators
            if each.bytes and each.seconds >= LEAST_SHARE * total and (is_product or not self._is_compiled)
        ]
        results.sort(key=lambda each: -each.seconds / each.bytes)
        could_go = [each for each in saved if each.bytes >= LEAST_SHARE * plain_bytes and not each.is_cast]
        peaks = [self._peak(policy) for policy in (None, AGAIN)]
        own = peaks[0] - peaks[1] if peaks[0] is not None and peaks[1] is not None else 0
        again = [each for each in self._saved(AGAIN) if each.is_input]
        assert self._input is not None
        return BlockCost(
            self._name,
            input_bytes=self._input.untyped_storage().nbytes(),
            plain_bytes=plain_bytes,
            again_s=added,
            keeping_s=max(0.0, keeping_s - plain_s - (added - kept_s)) if products else 0.0,
            results=tuple(results[:MOST_RESULTS]),
            stored=tuple(Stored(each.number, each.bytes) for each in could_go),
            own_bytes=own,
            cast_bytes=sum(each.bytes for each in saved if each.is_cast),
            forward_s=forward_s,
            backward_s=max(0.0, plain_s - forward_s),
            input_number=again[0].number if again else None,
        )

    @property
    def _is_compiled(self) -> bool:
        return self._config.compile == "blocks"

    @contextmanager
    def _under(self, policy: BlockPolicy | None, *, compiled: bool) -> Iterator[None]:
        """The block under a policy; every form is made once, so that it is compiled once."""
        own = self._block.__dict__
        before = own.get("forward"), self._block._compiled_call_impl
        key = policy, compiled
        if key not in self._forms:
            if compiled:
                self._block.compile()
            if policy is not None:
                Checkpointing(_Stack(self._block), Policy({"blocks.0": policy}))
            self._forms[key] = own.get("forward"), self._block._compiled_call_impl
        else:
            _set(self._block, self._forms[key])
        try:
            with torch.compiler.set_stance("default") if compiled else nullcontext():
                yield
        finally:
            _set(self._block, before)

    @contextmanager
    def _result(self) -> Iterator[Any]:
        """Result that the block returns for its inputs anew; inside, its caches and the like are as it leaves them."""

        def anew(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_(tensor is self._input)

        args, kwargs = map_tensors((self._args, self._kwargs), anew)
        torch.clear_autocast_cache()  # as before the first use of a weight in a step
        with self._again:
            yield self._block(*args, **kwargs)

    def _forward(self) -> list[Tensor]:
        """Call the block; the results that backward starts from."""
        with self._result() as result:
            return _differentiable(result)

    def _backward(self, results: Sequence[Tensor]) -> None:
        with torch.autocast(self._device.type, enabled=False):
            torch.autograd.backward(results, [torch.ones_like(each) for each in results])
        self._block.zero_grad(set_to_none=True)

    def _saved(self, policy: BlockPolicy | None) -> list[_Saved]:
        """Tensors that a call leaves for backward and nothing else holds, as a key-value cache does; and its input."""
        with self._under(policy, compiled=self._is_compiled):
            if self._is_compiled:
                self._forward()  # compiled before it is looked at
            numbers, found = SavedStorages(self._block), dict[int, _Saved]()
            storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
            outside = {storage.data_ptr() for each in self._resident for storage in storages_of(each)}
            assert self._input is not None
            own = self._input.untyped_storage().data_ptr()
            live = nullcontext() if self._is_compiled else LiveStorages(self._resident)

            def pack(tensor: Tensor) -> Tensor:
                number = numbers.number_of(tensor)
                if number is not None and number not in found:
                    address = tensor.untyped_storage().data_ptr()
                    made = address not in outside and (
                        not isinstance(live, LiveStorages) or any(life.start for life in live.lives_of(tensor))
                    )
                    if made or address == own:
                        size = tensor.untyped_storage().nbytes()
                        found[number] = _Saved(number, size, address == own, casts_parameter(tensor))
                        storages[number] = weakref.ref(tensor.untyped_storage())
                return tensor.detach()

            hooks = torch.autograd.graph.saved_tensors_hooks(torch.compiler.disable(pack), lambda tensor: tensor)
            with live, hooks, self._result() as result:
                numbers.let_go()
                self._backward(_differentiable(result))  # which frees what waits for it, though a cache holds the graph
                del result
                torch.clear_autocast_cache()
                gc.collect()
                return [each for number, each in found.items() if each.is_input or storages[number]() is None]

    def _operators(self) -> list[tuple[Result, bool]]:
        """Operators that computing again runs: with their seconds alone and bytes of results that can be kept (0 for
        those that cannot), and whether they are products."""
        runs = []
        for _ in range(CALLS):
            mode = Operators(self._clock)
            hooks = torch.autograd.graph.saved_tensors_hooks(mode.note_saved, lambda tensor: tensor)
            with self._under(None, compiled=False), mode, hooks:
                self._forward()
            runs.append(mode.found())
        count = min(map(len, runs))
        least = [min(run[place].seconds for run in runs) for place in range(count)]
        return [
            (dataclasses.replace(each, seconds=seconds), is_product(each.name.partition("#")[0]))
            for each, seconds in zip(runs[0], least, strict=False)
        ]

    def _seconds(self, policies: Sequence[BlockPolicy | None]) -> list[float]:
        """Medians of forward and backward together under each policy, in turns."""
        taken: dict[int, list[float]] = defaultdict(list)
        for turn in range(ROUNDS + 1):
            for place, policy in enumerate(policies):
                with self._under(policy, compiled=self._is_compiled):
                    self._clock.synchronize()
                    start = self._now()
                    for _ in range(CALLS):
                        self._backward(self._forward())
                    self._clock.synchronize()
                    if turn:  # the first is for warming up
                        taken[place].append((self._now() - start) / CALLS)
        return [statistics.median(taken[place]) for place in range(len(policies))]

    def _forward_seconds(self) -> float:
        samples = []
        with self._under(None, compiled=self._is_compiled):
            for _ in range(ROUNDS):
                self._clock.synchronize()
                start = self._now()
                for _ in range(CALLS):
                    self._forward()
                self._clock.synchronize()
                samples.append((self._now() - start) / CALLS)
        return statistics.median(samples)

    def _peak(self, policy: BlockPolicy | None) -> int | None:
        """The most bytes of forward and backward beyond what is there; None of compiled code on a CPU."""
        with self._under(policy, compiled=self._is_compiled):
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                before = torch.cuda.memory_allocated(self._device)
                self._backward(self._forward())
                return torch.cuda.max_memory_allocated(self._device) - before
            if self._is_compiled:
                return None
            with LiveStorages(self._resident) as live:
                before = live.bytes
                self._backward(self._forward())
            return live.peak - before


# The operators of a block's forward, one by one: how long each takes, and what it makes.
class Operators(TorchDispatchMode):
    """Inside, times every operator, and notes what it makes; `note_saved` is the hook of what autograd saves."""

    def __init__(self, clock: DeviceClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._counts: dict[str, int] = defaultdict(int)
        self._seen: list[tuple[Result, Any, Any, float]] = []
        self._maker: dict[int, int] = {}  # address of a storage → place in `_seen` of what made it last
        self._last_saved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        begin, start = self._clock.record(), time.perf_counter()
        result = func(*args, **kwargs)
        taken = time.perf_counter() - start
        end = self._clock.record()
        given = {storage.data_ptr() for each in tree_leaves((args, kwargs)) for storage in storages_of(each)}
        made = [storage for each in tree_leaves(result) for storage in storages_of(each)]
        is_view = any(storage.data_ptr() in given for storage in made)
        size = 0 if is_view or not can_be_kept(func, args, kwargs) else sum(storage.nbytes() for storage in made)
        if is_view and func._schema.is_mutable:  # what is changed in place cannot be kept as it was made
            for place in {self._maker[address] for storage in made if (address := storage.data_ptr()) in self._maker}:
                changed, *times = self._seen[place]
                self._seen[place] = dataclasses.replace(changed, bytes=0), times[0], times[1], times[2]
        elif not is_view:
            self._maker.update((storage.data_ptr(), len(self._seen)) for storage in made)
        operator = operator_name(func)
        name = f"{operator}#{self._counts[operator]}"
        self._counts[operator] += 1
        self._seen.append((Result(name, size, 0.0), begin, end, taken))
        return result

    def note_saved(self, tensor: Tensor) -> Tensor:
        self._last_saved = len(self._seen)
        return tensor.detach()

    def found(self) -> list[Result]:
        """Results of operators that ran before the last tensor was saved: with its saving, computing again ends."""
        self._clock.synchronize()
        return [
            dataclasses.replace(each, seconds=taken if begin is None else self._clock.elapsed_ms(begin, end) / 1e3)
            for each, begin, end, taken in self._seen[: self._last_saved]
        ]
