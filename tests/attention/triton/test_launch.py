"""What `Launcher` remembers of a launch, and what it must not: told by a kernel that only writes down its arguments.
What forward and backward compile: told by a driver and a compiler that only write down what is asked of them.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from trainstep.attention import flash, flash_attention
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
    for _ in range(2):
        for tensors, block in calls:
            launch(tensors, block)
        assert len(kernel.compiled) == len(calls)


def test_no_memory_is_kept_alive() -> None:
    kernel = Kernel()
    launch = Launcher(kernel, arguments)
    launch((torch.empty(8), torch.empty(8)), 2)
    kernel.compiled.clear()
    kernel.launched.clear()
    ((_, kept, _),) = launch._prepared.values()
    assert kept[0].base is None
    assert not any(isinstance(argument, Tensor) for argument in kept)


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
    processors = {"multi_processor_count": 132, "L2_cache_size": 1 << 25}
    properties = SimpleNamespace(**processors, major=capability[0], minor=capability[1])  # torch.compile asks, too

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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(flash, "unsupported", lambda q, k, v: None)
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "_prepared", {})
        monkeypatch.setitem(launcher._kernel.device_caches, 99, launcher._kernel.create_binder())
    with torch.library._scoped_library("trainstep", "IMPL") as library:
        library.impl("flash_attention_forward", flash._forward, "CPU")
        library.impl("flash_attention_backward", flash._gradients, "CPU")
        yield seen


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
def test_each_kernel_is_compiled_when_it_is_launched_and_once(
    watched: Watched, head_dim: int, scoring: dict[str, Any], backwards: list[str]
) -> None:
    def heads(n: int, batch: int = 2) -> Tensor:
        return torch.empty(batch, n, 200, head_dim, dtype=torch.bfloat16, requires_grad=True)

    for batch in (2, 3):
        o = flash_attention(heads(4, batch), heads(2, batch), heads(2, batch), **scoring)
        assert watched.launched[-1] == "forward_kernel"
        o.backward(torch.empty_like(o))
    assert watched.launched == ["forward_kernel", *backwards] * 2
    assert watched.compiled == ["forward_kernel", *backwards]


@pytest.mark.parametrize("watched", [HOPPER], indirect=True)
def test_compiled_by_torch(watched: Watched) -> None:
    q, k, v = (torch.empty(1, 1, 40, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.compile(flash_attention, backend="aot_eager", fullgraph=True)(q, k, v).sum().backward()
    assert watched.launched == ["forward_kernel", *SINGLE]
    assert len(watched.compiled) == 4
