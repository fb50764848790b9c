"""What `Launcher` remembers of a launch, and what it must not: told by a kernel that only writes down its arguments."""

import inspect
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from trainstep.attention.triton import Launch, Launcher


@dataclass
class Descriptor:
    base: Any
    rows: int


class Kernel:
    """Stands for a Triton kernel with these arguments: `kernel[grid](…)` and what it returns."""

    arg_names = ("a_desc", "a_ptr", "b_ptr", "size", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_launch(num_warps: int, **named: Any) -> Any:
            arguments = tuple(named[name] for name in self.arg_names)
            self.compiled.append(arguments)
            self.launched.append((grid, *arguments))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self._kernel.launched.append((grid, *arguments))


def arguments(kernel: Any, tensors: dict[str, Tensor], block: int) -> Launch:
    a, b = tensors["a"], tensors["b"]
    named = {"a_desc": Descriptor(a, 4), "a_ptr": a, "b_ptr": b, "size": a.shape[0], "BLOCK": block, "num_warps": 4}
    return a.shape[0] // block, named


def launched_with(kernel: Kernel) -> tuple[Any, ...]:
    """The last launch, with tensors told by their memory."""
    grid, descriptor, a, b, size, block = kernel.launched[-1]
    return grid, descriptor.base.data_ptr(), descriptor.rows, a.data_ptr(), b.data_ptr(), size, block


def test_a_call_like_an_earlier_one_changes_only_the_tensors() -> None:
    kernel = Kernel()
    launch = Launcher(kernel, arguments)
    for _ in range(3):
        a, b = torch.empty(8), torch.empty(8)
        launch((a, b), 2)
        assert launched_with(kernel) == ((4, 1, 1), a.data_ptr(), 4, a.data_ptr(), b.data_ptr(), 8, 2)
    assert len(kernel.compiled) == 1


def test_one_tensor_passed_twice_is_not_taken_for_two() -> None:
    kernel = Kernel()
    launch = Launcher(kernel, arguments)
    both = torch.empty(8)
    launch((both, both), 2)
    a, b = torch.empty(8), torch.empty(8)
    launch((a, b), 2)
    assert len(kernel.compiled) == 1
    assert launched_with(kernel)[3:5] == (a.data_ptr(), b.data_ptr())


def test_what_compiles_differently_is_compiled_again() -> None:
    kernel = Kernel()
    launch = Launcher(kernel, arguments)
    storage = torch.empty(64)
    calls = [
        ((storage[:8], storage[:8]), 2),
        ((storage[:16], storage[:8]), 2),  # another shape
        ((storage[:8], storage[1:9]), 2),  # another alignment
        ((storage[0:16:2], storage[:8]), 2),  # other strides
        ((storage[:8].half(), storage[:8]), 2),  # another dtype
        ((storage[:8], storage[:8]), 4),  # another setting
    ]
    for tensors, block in calls:
        launch(tensors, block)
    assert len(kernel.compiled) == len(calls)
    for tensors, block in calls:
        launch(tensors, block)
    assert len(kernel.compiled) == len(calls)


def test_no_memory_is_kept_alive() -> None:
    kernel = Kernel()
    launch = Launcher(kernel, arguments)
    a, b = torch.empty(8), torch.empty(8)
    launch((a, b), 2)
    kernel.compiled.clear()
    kernel.launched.clear()
    ((_, kept, _),) = launch._prepared.values()
    assert kept[0].base is None
    assert not any(isinstance(argument, Tensor) for argument in kept)


class Compiling(Kernel, JITFunction):
    """One that Triton compiles: all that share `together` are being compiled before any is done, and loaded as well."""

    def __init__(self, together: threading.Barrier, launched: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self._together, self.launched = together, launched

    def warmup(self, *args: Any, grid: Any, **named: Any) -> Any:
        mode = active_mode.get()
        assert mode is not None
        more = len(inspect.signature(mode.submit).parameters) - 2  # later versions of Triton clean up, too
        return mode.submit(id(self), self.compile_it, *[lambda kernel: None] * more)

    def compile_it(self) -> Any:
        self._together.wait(timeout=30)
        return self

    @property
    def run(self) -> Any:  # as of `CompiledKernel`: loads it
        self._together.wait(timeout=30)
        return None


def test_what_is_new_in_one_call_is_compiled_at_the_same_time_and_launched_in_turn() -> None:
    together, order = threading.Barrier(2), list[tuple[Any, ...]]()
    first, second = (Launcher(Compiling(together, order), arguments) for _ in range(2))
    a, b = torch.empty(8), torch.empty(8)
    for _ in range(2):
        Launcher.in_turn((first, (a, b), (2,)), (second, (b, a), (4,)))
        assert [(grid, size) for (grid, *_), size in zip(order, (4, 2), strict=True)] == [
            ((4, 1, 1), 4),
            ((2, 1, 1), 2),
        ]
        order.clear()
    assert together.n_waiting == 0
    assert not together.broken
    Launcher.in_turn((first, (a, b), (2,)), (second, (b, a), (2,)))  # one alone is new: nothing to wait for
    assert len(order) == 2


def test_what_a_compiler_says_in_another_thread_is_raised() -> None:
    broken = threading.Barrier(2)
    broken.abort()
    first, second = (Launcher(Compiling(broken, []), arguments) for _ in range(2))
    both = torch.empty(8)
    with pytest.raises(threading.BrokenBarrierError):
        Launcher.in_turn((first, (both, both), (2,)), (second, (both, both), (2,)))
    assert active_mode.get() is None
