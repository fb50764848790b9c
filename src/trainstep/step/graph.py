"""A training step in CUDA graphs: the device's work is captured once, and each phase is then one launch.

Where launches set the pace the device waits while the host gives it thousands of kernels. A CUDA graph gives them at
once. Each phase is a graph of its own, as every instrument listens to phases (notebook/lab-log.md, 2026-11-29, has the
cost of further launches). All graphs share a pool of memory, as they always run in the order of their capture.

A replay reads and writes the addresses that were captured. So batches are copied into tensors that stay, learning rates
are tensors, and where weights, buffers, gradients or optimizer state have moved, as after a checkpoint is loaded, the
graph is captured anew. Random numbers differ from step to step: torch registers the device's generator with a graph. A
number that the host draws would be repeated in every step, so such a model is refused.

Passes run a few times before they are captured, as libraries and compiled code set themselves up in the first ones.
Random states and buffers are put back then: every result comes from a replay, also the first. The first update runs as
it is, since it makes the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.config import PhaseContext, no_phases
from trainstep.base.errors import UnsupportedError, place_of
from trainstep.step.batches import map_tensors, tensors_of
from trainstep.step.randomness import from_seed, host_states, is_same_state
from trainstep.step.weights import load_buffers, optimizer_state_tensors

WARMUP = 3
"""Passes before the one that is captured: compiled code is there from the second on, and autograd's streams."""
REFUSED = "a CUDA graph cannot have this step"


def capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Have an optimizer of torch's read its learning rates and count its steps on the device.

    Raises:
        UnsupportedError: it cannot, so that a graph would repeat the numbers of the step that was captured.
    """
    for group in optimizer.param_groups:
        if not group.get("fused") and "capturable" not in group:
            raise UnsupportedError(f"{REFUSED}: {type(optimizer).__name__} has no capturable or fused form in torch")
        group |= {"capturable": True} if "capturable" in group else {}
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()


class _Graphs:
    """The device's work of a function, captured in one CUDA graph for each phase that it announces."""

    def __init__(self, run: Callable[[PhaseContext], Any], pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._graphs: list[tuple[str, torch.cuda.CUDAGraph]] = []
        self.peaks: dict[str, int] = {}
        """Most bytes in live tensors by phase, in and outside of the pool."""
        self.result = run(self._phase)
        """Return value of the function, whose tensors each replay writes."""

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, as a loader's that pins memory, may go on meanwhile.
        torch.cuda.reset_peak_memory_stats(self._stream.device)
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            yield
        self._graphs.append((name, graph))
        self.peaks[name] = torch.cuda.max_memory_allocated(self._stream.device)

    def replay(self, phase: PhaseContext) -> None:
        for name, graph in self._graphs:
            with phase(name):
                graph.replay()


@dataclass
class _Pass:
    """A captured forward and backward pass, with the tensors that it reads and writes."""

    graphs: _Graphs
    places: tuple[Any, ...]
    """Addresses and settings that it was captured with."""
    layout: str
    batch: list[Tensor]
    gradients: list[tuple[nn.Parameter, Tensor]]


class StepGraph:
    """Captures and replays the passes and updates of one module and optimizer.

    Args:
        module, optimizer: on a GPU; the optimizer is made `capturable` here.

    Raises:
        UnsupportedError: the optimizer cannot be captured.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        if device.type != "cuda":
            raise UnsupportedError(f"{REFUSED}: it runs on {device}, and CUDA graphs need a GPU of NVIDIA's")
        capturable(optimizer, device)
        self._module, self._optimizer, self._device = module, optimizer, device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        self._own_bytes: dict[str, int] = {}
        self._passes: dict[bool, _Pass] = {}
        """By whether gradients are there already, to which a pass adds its own."""
        self._update: tuple[tuple[Any, ...], _Graphs] | None = None
        self._last_update: tuple[Any, ...] = ()
        """Addresses and settings after the last update that ran as it is."""

    def memory(self) -> tuple[int, dict[str, int]]:
        """Bytes in live tensors outside of the graphs' pool, and the most during each phase, the pool's included.

        Between replays no tensor holds most of the pool, so torch's counters know of a phase when it is captured alone.
        """
        own = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(self._pool)]
        outside = torch.cuda.memory_allocated(self._device) - sum(each["allocated_size"] for each in own)
        return outside, {name: outside + size for name, size in self._own_bytes.items()}

    def differentiate(
        self, run: Callable[[Any, PhaseContext], Tensor], batch: Any, phase: PhaseContext, settings: tuple[Any, ...]
    ) -> Tensor:
        """Loss of a pass, whose gradients come, or are added, to `.grad`.

        Args:
            run: takes the pass on a batch; every kernel of it is in a phase.
            settings: all else that changes what `run` does.

        Raises:
            UnsupportedError: the pass cannot be captured, or the batch has another layout than the one that was.
        """
        parameters = list(self._module.parameters())
        adds = any(each.grad is not None for each in parameters)
        places = (settings, *_addresses([*parameters, *self._module.buffers()]))
        places += _addresses([each.grad for each in parameters if each.grad is not None])
        found = self._passes.get(adds)
        layout = _layout(batch)
        if found is not None and found.layout != layout:
            told = f"{layout}, the first had {found.layout}; pad them to one shape, or leave --graph off"
            raise UnsupportedError(f"{REFUSED}: a batch has {told}")
        if found is None or found.places != places:
            if not adds:
                self._passes.clear()
            self._update = None  # its scratch memory may lie where these gradients come
            found = self._passes[adds] = self._captured_pass(run, batch, places, adds)
        for own, given in zip(found.batch, tensors_of(batch), strict=True):
            own.copy_(given, non_blocking=True)
        found.graphs.replay(phase)
        for parameter, gradient in found.gradients:
            parameter.grad = gradient
        return found.graphs.result.clone()

    def _captured_pass(
        self, run: Callable[[Any, PhaseContext], Tensor], batch: Any, places: tuple[Any, ...], adds: bool
    ) -> _Pass:
        static = map_tensors(batch, torch.clone)
        # A pass that adds to gradients would change them; the one before has set up the same kernels.
        for number in range(0 if adds else WARMUP):
            with _refusing_reads() if number + 1 == WARMUP else nullcontext():
                self._try(lambda: run(static, no_phases))
            self._module.zero_grad(set_to_none=True)
        graphs = self._captured(lambda phase: run(static, phase))
        gradients = [(each, each.grad) for each in self._module.parameters() if each.grad is not None]
        return _Pass(graphs, places, _layout(batch), tensors_of(static), gradients)

    def update(
        self, run: Callable[[PhaseContext], Tensor | None], phase: PhaseContext, settings: tuple[Any, ...]
    ) -> Tensor | None:
        """Update the weights from the gradients that are there.

        Args:
            run: does that, in a phase; returns the gradients' norm, or None.
            settings: all else that changes what `run` does.

        Raises:
            UnsupportedError: the update cannot be captured.
        """
        places = self._places_of_update(settings)
        if self._update is None or self._update[0] != places:
            if self._last_update != places:
                with self._aside():
                    norm = run(phase)
                self._last_update = self._places_of_update(settings)
                return norm
            self._update = places, self._captured(run)
        self._update[1].replay(phase)
        norm = self._update[1].result
        return None if norm is None else norm.clone()

    def _places_of_update(self, settings: tuple[Any, ...]) -> tuple[Any, ...]:
        groups = self._optimizer.param_groups
        values = [value for group in groups for name, value in group.items() if name != "params"]
        own = [each for group in groups for each in group["params"]]
        gradients = [each.grad for each in own if each.grad is not None]
        tensors = [each for each in values if isinstance(each, Tensor)]
        return (
            settings,
            *(each for each in values if not isinstance(each, Tensor)),
            *_addresses([*tensors, *own, *gradients, *optimizer_state_tensors(self._optimizer)]),
        )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside, work goes to the stream that graphs are captured on, in order with the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _try(self, run: Callable[[], object]) -> None:
        """Run without a trace in buffers or random states; refuse what a graph would repeat."""
        buffers = {name: each.clone() for name, each in self._module.named_buffers()}
        before = _addresses(self._module.buffers())
        with from_seed(0, [self._device]):
            drawn = host_states()
            with self._aside():
                run()
            if not all(is_same_state(a, b) for a, b in zip(drawn, host_states(), strict=True)):
                raise UnsupportedError(f"{REFUSED}: it draws random numbers on the host, which would never change")
        if _addresses(self._module.buffers()) != before:
            raise UnsupportedError(f"{REFUSED}: it replaces a buffer of the module, whose first one would be read")
        load_buffers(self._module, buffers)

    def _captured(self, run: Callable[[PhaseContext], Any]) -> _Graphs:
        outside = self.memory()[0]
        try:
            found = _Graphs(run, self._pool, self._stream)
            self._own_bytes |= {name: peak - outside for name, peak in found.peaks.items()}
            return found
        except RuntimeError as error:
            self._end_failed_capture()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            why = str(error).strip().partition("\n")[0]
            raise UnsupportedError(f"{REFUSED}: {why}") from error

    def _end_failed_capture(self) -> None:
        """Have torch's allocator and generator forget a capture that broke off, which torch itself leaves open."""
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _refusing_reads() -> Iterator[None]:
    """Inside, whoever waits for the device to read a value is refused, before a capture breaks off there."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise UnsupportedError(f"{REFUSED}: it reads a value of the device on the host{place_of(error)}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _layout(batch: Any) -> str:
    """Text of the batch with a dtype and a shape in the place of each tensor."""
    described: Any = lambda tensor: (tensor.dtype, tuple(tensor.shape))  # noqa: E731
    return repr(map_tensors(batch, described))


def _addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(each.data_ptr() for each in tensors)
