"""What `Launcher` remembers of a launch, and what it must not: told by a kernel that only writes down its arguments.
What forward and backward compile: told by a driver and a compiler that only write down what is asked of them.
"""

import contextlib
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton import FutureKernel
from triton.backends.compiler import GPUTarget
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from trainstep.attention import FlashAttentionTriton, flash, flash_attention
from trainstep.attention.hopper import backward as hopper_backward
from trainstep.attention.hopper import dkdv as hopper_dkdv
from trainstep.attention.hopper import dq as hopper_dq
from trainstep.attention.hopper import dq_sum
from trainstep.attention.hopper import forward as hopper_forward
from trainstep.attention.triton import Launch, Launcher, backward, forward


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
    return (a.shape[0] // block,), named


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


def test_what_comes_later_is_compiled_with_what_is_new_and_not_launched() -> None:
    together, order = threading.Barrier(2), list[tuple[Any, ...]]()
    now, after = (Launcher(Compiling(together, order), arguments) for _ in range(2))
    a, b, asked = torch.empty(8), torch.empty(8), []

    def later() -> Any:
        asked.append(after)
        return [(after, (a, b), (4,))]

    for n_launches in (1, 2):
        now((a, b), 2, later=later)
        assert len(order) == n_launches
    assert len(asked) == 1
    assert not together.broken


def test_what_comes_later_and_cannot_be_compiled_is_raised_at_once() -> None:
    broken = threading.Barrier(2)
    broken.abort()
    now, after = (Launcher(Compiling(broken, []), arguments) for _ in range(2))
    both = torch.empty(8)
    with pytest.raises(threading.BrokenBarrierError):
        now((both, both), 2, later=lambda: [(after, (both, both), (2,))])
    assert active_mode.get() is None


def test_a_kernel_beside_which_another_could_not_be_compiled_is_launched() -> None:
    class Unfinished(Kernel):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            future: Future[Any] = Future()
            launch = super().__getitem__(grid)

            def unfinished(**named: Any) -> FutureKernel:
                future.set_result(launch(**named))
                return FutureKernel(lambda kernel: None, future)

            return unfinished

    kernel = Unfinished()
    launch = Launcher(kernel, arguments)
    for n_launches in (1, 2):
        launch((torch.empty(8), torch.empty(8)), 2)
        assert len(kernel.launched) == n_launches


@dataclass
class Watched:
    """What a GPU that is not there was asked for, by the kernels' names."""

    compiled: list[str]
    launched: list[str]


LAUNCHERS = [
    forward.launch_forward, backward.launch_dq, backward.launch_dkdv, hopper_forward.launch_forward,
    hopper_backward.launch_products, dq_sum.launch_prepare, dq_sum.launch_finish, hopper_dq.launch_dq,
    hopper_dkdv.launch_dkdv,
]  # fmt: skip


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """Our operators on the CPU as on a GPU of some capability, where nothing has been compiled; without results."""
    seen, capability = Watched([], []), request.param
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=1 << 25)

    def compile_nothing(source: Any, **_: Any) -> Any:
        seen.compiled.append(source.name)
        run = lambda *arguments: seen.launched.append(source.name)  # noqa: E731
        kernel = {"run": run, "function": None, "packed_metadata": None, "launch_metadata": lambda *arguments: None}
        return type("Nothing", (SimpleNamespace,), {"__getitem__": lambda self, grid: run})(**kernel)

    driver = SimpleNamespace(
        get_current_device=lambda: 99,  # what is compiled for another GPU is not found
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.compiler, "compile", compile_nothing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(flash, "unsupported", lambda q, k, v: None)
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "_prepared", {})
        launcher._kernel.device_caches.pop(99, None)
    with torch.library._scoped_library("trainstep", "IMPL") as library:
        library.impl("flash_attention_forward", flash._forward, "CPU")
        library.impl("flash_attention_backward", flash._gradients, "CPU")
        yield seen
    for launcher in LAUNCHERS:
        launcher._kernel.device_caches.pop(99, None)


SINGLE, PAIR = ["prepare_dq_kernel", "backward_kernel", "finish_dq_kernel"], ["dq_kernel", "dkdv_kernel"]
AMPERE, HOPPER = (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("watched", "head_dim", "scoring", "backwards"),
    [
        (HOPPER, 64, {"is_causal": True}, SINGLE),
        (HOPPER, 96, {}, SINGLE),
        (HOPPER, 128, {"is_causal": True, "window": 50, "scale": -0.1}, SINGLE),
        (HOPPER, 256, {"is_causal": True}, PAIR),
        (HOPPER, 64, {"softcap": 20.0}, PAIR),
        (AMPERE, 64, {"is_causal": True, "window": 50, "cu_seqlens": torch.tensor([0, 70, 200])}, PAIR),
        (AMPERE, 20, {}, PAIR),
    ],
    indirect=["watched"],
)
@pytest.mark.parametrize("is_heads_first", [True, False])
def test_forward_compiles_what_backward_will_launch(
    watched: Watched, head_dim: int, scoring: dict[str, Any], backwards: list[str], is_heads_first: bool
) -> None:
    def heads(n: int, batch: int = 2) -> Tensor:
        if is_heads_first:
            return torch.empty(batch, n, 200, head_dim, dtype=torch.bfloat16, requires_grad=True)
        return torch.empty(batch, 200, n, head_dim, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)

    o = flash_attention(heads(4), heads(2), heads(2), **scoring)
    assert sorted(watched.compiled) == sorted(["forward_kernel", *backwards])
    assert watched.launched == ["forward_kernel"]
    o.backward(torch.empty_like(o))
    assert watched.launched == ["forward_kernel", *backwards]
    o = flash_attention(heads(4, batch=3), heads(2, batch=3), heads(2, batch=3), **scoring)
    o.backward(torch.empty_like(o))
    assert watched.launched == ["forward_kernel", *backwards] * 2
    assert len(watched.compiled) == 1 + len(backwards)


@pytest.mark.parametrize("watched", [AMPERE, HOPPER], indirect=True)
def test_only_a_forward_that_a_backward_follows_compiles_for_it(watched: Watched) -> None:
    leaf = torch.empty(1, 1, 40, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        flash_attention(leaf, leaf, leaf)
        FlashAttentionTriton.apply(leaf, leaf, leaf, True)
    flash_attention(*(leaf.detach(),) * 3, softcap=3.0)
    assert watched.compiled == ["forward_kernel"] * 3
    FlashAttentionTriton.apply(leaf, leaf, leaf, True, None, None, None, 3.0)
    assert sorted(watched.compiled[3:]) == ["dkdv_kernel", "dq_kernel", "forward_kernel"]


@pytest.mark.parametrize("watched", [HOPPER], indirect=True)
def test_what_backward_finds_unlike_forward_took_it_to_be_is_compiled_then(watched: Watched) -> None:
    q, k, v = (torch.empty(1, 40, 3, 24, dtype=torch.float16, requires_grad=True).transpose(1, 2) for _ in range(3))
    o = flash_attention(q, k, v)
    assert sorted(watched.compiled) == ["dkdv_kernel", "dq_kernel", "forward_kernel"]
    o.backward(torch.empty(1, 3, 40, 24, dtype=torch.float16))
    assert sorted(watched.compiled[3:]) == ["dkdv_kernel", "dq_kernel"]
    assert watched.launched == ["forward_kernel", "dq_kernel", "dkdv_kernel"]


@pytest.mark.parametrize("watched", [HOPPER], indirect=True)
def test_compiled_by_torch(watched: Watched) -> None:
    q, k, v = (torch.empty(1, 1, 40, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.compile(flash_attention, backend="aot_eager", fullgraph=True)(q, k, v).sum().backward()
    assert watched.launched == ["forward_kernel", *SINGLE]
    assert len(watched.compiled) == 4
