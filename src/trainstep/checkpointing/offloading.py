"""Activations that wait in host memory between forward and backward, beside the computation.

Around a call of a block, every storage that autograd saves passes a hook (`torch.autograd.graph.saved_tensors_hooks`).
Those that are to go are copied, whole and once however many tensors lie in them, to page-locked buffers:

- In forward, a stream of its own copies a storage as soon as the computation has made it. The storage is let go when
  the next block's call ends: the computation then waits for the copy, so that at most two calls' copies are under way.
- In backward, a second stream begins to bring back a call's storages when the gradient of the block after it arrives:
  one block is computed with while the one before it is on its way.
- Buffers return to a pool when the graph lets go of them, and are taken again in the next step.

On a CPU the same path makes plain copies, which saves nothing; it is there to be tested.

Parameters and buffers never go. Nor do tensors whose storage is not all of them (wrappers such as DTensor, sparse ones,
conjugated ones). autograd does not look after tensors that passed a hook: a change in place, which it would have
refused, is refused here.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from trainstep.base.errors import UnsupportedError


class Offloading:
    """Sends what blocks leave for backward to host memory. One for a model, whose blocks' calls follow one another."""

    def __init__(self) -> None:
        self._pool = _Pool()
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._latest: weakref.ref[_Call] | None = None

    def install(self, name: str, block: nn.Module, numbers: Collection[int]) -> None:
        """From now on a call of `block` sends the storages with these numbers, as `BlockPolicy.host` counts them.

        All blocks of a model are installed, those that send nothing too: their calls are when others' copies end and
        begin. The hooks are outside of what `block.compile()` compiles, so it is compiled before, if at all.
        """
        place = "forward" if block._compiled_call_impl is None else "_compiled_call_impl"
        run = functools.partial(self._run, name, block, frozenset(numbers), getattr(block, place))
        object.__setattr__(block, place, run)

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers in host memory, taken or not."""
        return self._pool.bytes

    def _run(
        self,
        name: str,
        block: nn.Module,
        numbers: frozenset[int],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                f"checkpointing: what {name} sends to host memory has to pass outside of compiled code, and the code "
                "around the block is compiled; compile blocks (--compile blocks), before the policy is applied"
            )
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        before = self._latest() if self._latest is not None else None
        call = _Call(name, block, numbers, self)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack) if numbers else nullcontext():
            result = function(*args, **kwargs)
        call.end()
        if before is not None:
            before.let_go()
        self._latest = weakref.ref(call)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(_arrives, call, None if before is None else weakref.ref(before)))
        return result

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The streams that copy to host memory and back."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]

    @property
    def pool(self) -> _Pool:
        """Buffers in host memory."""
        return self._pool


class SavedStorages:
    """Numbers the storages that one call of a block saves for backward, its parameters and buffers apart."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._resident: set[int] | None = None
        self._numbers: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no address is used twice while the call runs

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of the storage that `tensor` lies in; None where it is not one that can go."""
        wrapper: Any = tensor
        if (
            is_traceable_wrapper_subclass(wrapper)
            or tensor.layout != torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return None
        address = storage.data_ptr()
        if self._resident is None:  # within the call, when a sharded module has its parameters
            found: tuple[Any, ...] = (*self._block.parameters(), *self._block.buffers())
            plain = [each for each in found if not is_traceable_wrapper_subclass(each)]
            self._resident = {each.untyped_storage().data_ptr() for each in plain}
        if address in self._resident:
            return None
        if address not in self._numbers:
            self._numbers[address] = len(self._numbers)
            self._held.append(storage)
        return self._numbers[address]

    def let_go(self) -> None:
        """The call is over."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._numbers)


class _Call:
    """A call of a block."""

    def __init__(self, name: str, block: nn.Module, numbers: frozenset[int], offloading: Offloading) -> None:
        self.name = name
        self.offloading = offloading
        self._numbers = numbers
        self._saved: SavedStorages | None = SavedStorages(block)
        self._sent: dict[int, weakref.ref[_Sent]] = {}

    def pack(self, tensor: Tensor) -> _Kept | _Part:
        if self._saved is None:  # saved later, by what the call started and did not finish
            return _Kept(tensor, self)
        number = self._saved.number_of(tensor)
        if number is None or number not in self._numbers:
            return _Kept(tensor, self)
        sent = self._sent[number]() if number in self._sent else None
        if sent is None:
            sent = _Sent(tensor, self)
            self._sent[number] = weakref.ref(sent)
        return _Part(tensor, sent)

    def end(self) -> None:
        """The forward is over."""
        if max(self._numbers, default=-1) >= len(self._saved or ()):
            raise UnsupportedError(
                f"checkpointing: the policy sends storage {max(self._numbers)} of {self.name} to host memory, and its "
                f"call saves only {len(self._saved or ())}; make the policy for this model, batch and compilation"
            )
        self._saved = None

    def sent(self) -> list[_Sent]:
        return [each for reference in self._sent.values() if (each := reference()) is not None]

    def let_go(self) -> None:
        """The device's copies are given up as soon as they have been copied."""
        for each in self.sent():
            each.let_go()

    def fetch(self) -> None:
        """Begin to bring back what is in host memory alone."""
        for each in reversed(self.sent()):
            each.bring_back()


def _arrives(call: _Call, before: weakref.ref[_Call] | None, gradient: Tensor) -> None:
    """The gradient of a call's output: backward comes to it, and then to the call before."""
    call.fetch()
    earlier = before() if before is not None else None
    if earlier is not None:
        earlier.fetch()


class _Kept:
    """A tensor that stays where it is."""

    def __init__(self, tensor: Tensor, call: _Call) -> None:
        self._tensor = tensor.detach()  # with its graph, a saved output would keep itself alive in a circle
        self._version, self._name = tensor._version, call.name

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise _changed(self._name)
        return self._tensor


class _Part:
    """A tensor that lies in a storage that went."""

    def __init__(self, tensor: Tensor, sent: _Sent) -> None:
        self._sent = sent
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()
        sent.note(tensor)

    def get(self) -> Tensor:
        storage = self._sent.storage()
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, self._offset, self._shape, self._stride)


class _Sent:
    """A storage on its way to host memory, there, and on its way back."""

    def __init__(self, tensor: Tensor, call: _Call) -> None:
        self._call = call
        self._device = tensor.device
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._bytes: Tensor | None = empty.set_(tensor.untyped_storage())
        self._size = self._bytes.numel()
        self._watched: list[tuple[Tensor, int]] = []
        self._is_changed = False
        self._pool = call.offloading.pool
        self._copied: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        self._buffer, ready = self._pool.take(self._size, self._device)
        if self._device.type == "cuda":
            out, _ = call.offloading.streams(self._device)
            out.wait_stream(torch.cuda.current_stream(self._device))
            if ready is not None:
                out.wait_event(ready)
            with torch.cuda.stream(out):
                self._buffer.copy_(self._bytes, non_blocking=True)
                self._copied = out.record_event()
        else:
            self._buffer.copy_(self._bytes)

    def note(self, tensor: Tensor) -> None:
        """Look out for changes of a tensor in this storage, until the device's copy is given up."""
        self._is_changed |= self._changes()
        self._watched.append((tensor.detach(), tensor._version))

    def _changes(self) -> bool:
        """True if a tensor has changed since it was saved; what is given up can change no more."""
        return any(tensor._version != version for tensor, version in self._watched)

    def let_go(self) -> None:
        if self._bytes is None or self._arrived is not None:
            return
        self._is_changed |= self._changes()
        self._watched.clear()
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        self._bytes = None

    def bring_back(self) -> None:
        if self._bytes is not None:
            return
        self._bytes = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            _, back = self._call.offloading.streams(self._device)
            back.wait_stream(torch.cuda.current_stream(self._device))  # which may still use this memory for something
            assert self._copied is not None
            back.wait_event(self._copied)
            with torch.cuda.stream(back):
                self._bytes.copy_(self._buffer, non_blocking=True)
                self._arrived = back.record_event()
        else:
            self._bytes.copy_(self._buffer)

    def storage(self) -> torch.UntypedStorage:
        """On the device, when the computation comes to it."""
        self._is_changed |= self._changes()
        if self._is_changed:
            raise _changed(self._call.name)
        self._call.fetch()
        assert self._bytes is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return self._bytes.untyped_storage()

    def __del__(self) -> None:
        latest = self._arrived or self._copied if hasattr(self, "_arrived") else None
        if latest is not None and self._bytes is not None:  # its memory is used again once no copy needs it
            torch.cuda.current_stream(self._device).wait_event(latest)
        if hasattr(self, "_buffer"):
            self._pool.give(self._buffer, latest, self._device)


class _Pool:
    """Buffers in host memory, page-locked where the device is a GPU, by size."""

    def __init__(self) -> None:
        self.bytes = 0
        self._free: dict[tuple[int, bool], list[tuple[Tensor, torch.cuda.Event | None]]] = defaultdict(list)

    def take(self, size: int, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        """A buffer, and what to wait for before it is written to.

        Raises:
            UnsupportedError: there is no page-locked memory left.
        """
        is_pinned = device.type == "cuda"
        if free := self._free[size, is_pinned]:
            return free.pop()
        try:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:
            raise UnsupportedError(
                f"checkpointing: no page-locked host memory for {size / 2**20:.0f} MiB more after "
                f"{self.bytes / 2**30:.2f} GiB; send fewer activations there (--host-gib of trainstep memory --fit) "
                f"or raise the limit of locked memory (ulimit -l): {str(error).splitlines()[0]}"
            ) from error
        self.bytes += size
        return buffer, None

    def give(self, buffer: Tensor, used: torch.cuda.Event | None, device: torch.device) -> None:
        """A buffer back, which a copy may be using until the event."""
        self._free[buffer.numel(), device.type == "cuda"].append((buffer, used))


def _unpack(packed: _Kept | _Part) -> Tensor:
    return packed.get()


def _changed(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"checkpointing: what {name} keeps for backward was changed in place afterwards, so it is not what backward "
        "needs; let the change work on a copy, or send nothing of this block to host memory"
    )
