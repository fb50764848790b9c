"""Gradients, from the full parameters of every rank to the shards' `.grad`.

A buffer holds the gradients of a group, destination by destination: first all that rank 0 owns, then rank 1's, and so
on. Gradients in the shards' own dtype are reduce-scattered. Gradients in a narrower dtype are *exchanged* as they are
(an all-to-all: each rank gets every rank's version of its own rows), and each rank then adds up its rows in the shards'
dtype, in the order of the ranks. That is the sum which a reduce-scatter in the wide dtype makes, for as few bytes on
the wire as one in the narrow dtype: half of them for bfloat16 into float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.collectives import Pending, SideStream, all_reduce_mean, reduce_scatter_mean, slice_of
from trainstep.parallel.fsdp.shards import ShardedParameter
from trainstep.parallel.fsdp.transport import Collectives, Transport

_ALIGNMENT = 16
"""Elements at whose multiples a parameter starts in a buffer."""


@dataclass
class BufferReduction:
    """A buffer's content under way: the mean over the ranks of this rank's rows."""

    pending: Pending
    rows: list[tuple[ShardedParameter, Tensor]]
    written: set[ShardedParameter]
    """Those that this rank had a gradient of."""

    def complete(self) -> list[tuple[ShardedParameter, Tensor]]:
        """Wait; attach what this rank had a gradient of. Returns what it sent zeros for, to be decided later."""
        self.pending.wait()
        for parameter, gradient in self.rows:
            if parameter in self.written:
                parameter.attach_gradient(gradient)
        return [row for row in self.rows if row[0] not in self.written]


class GradientBuffer:
    """Gradients of sharded parameters that are computed in one dtype and trained in one dtype."""

    def __init__(self, parameters: Sequence[ShardedParameter], process_group: dist.ProcessGroup) -> None:
        self._parameters, self._process_group, self._ranks = parameters, process_group, process_group.size()
        self._dtype = parameters[0].shard.dtype
        self._starts: dict[ShardedParameter, int] = {}
        self._size = 0  # elements per destination
        for parameter in parameters:
            self._starts[parameter] = self._size
            self._size += -(-self._shard_size(parameter) // _ALIGNMENT) * _ALIGNMENT
        self.transport: Transport = Collectives(process_group)
        self._send: Tensor | None = None  # (ranks, size)
        self._written: set[ShardedParameter] = set()

    def exchange_bytes(self, compute_dtype: torch.dtype | None) -> int:
        """Bytes of the buffer when it is exchanged; 0 if its gradients are as wide as the shards, and reduced."""
        dtype = self._parameters[0].compute_dtype(compute_dtype)
        return 0 if dtype == self._dtype else self._ranks * self._size * dtype.itemsize

    @property
    def holds_gradients(self) -> bool:
        """Whether something has not been sent."""
        return self._send is not None

    def add(self, parameter: ShardedParameter, gradient: Tensor, *, accumulate: bool) -> None:
        """Put a full gradient in its place, or add it to what is there.

        Args:
            parameter: whose gradient it is.
            gradient: of the full parameter's shape.
            accumulate: more will come before it is sent, so the buffer is in the shards' dtype.
        """
        if self._send is None:
            dtype = self._dtype if accumulate else gradient.dtype
            self._send = torch.empty(self._ranks, self._size, dtype=dtype, device=gradient.device)
        elif accumulate and self._send.dtype != self._dtype:
            self._send = self._send.to(self._dtype)
        place = self._place(self._send, parameter)  # (ranks, elements of a shard)
        source = gradient.reshape(-1)
        full, rest = divmod(source.numel(), place.shape[1])  # ranks with all their rows; elements of the next
        pairs = [(place[:full], source[: full * place.shape[1]].view(full, -1))] if full else []
        if rest:  # what stands behind them in their place is never looked at
            pairs.append((place[full, :rest], source[-rest:]))
        for target, part in pairs:
            if parameter in self._written:
                target.add_(part)
            else:
                _copy(target, part)
        self._written.add(parameter)

    def discard(self) -> None:
        """Forget what has not been sent."""
        self._send, self._written = None, set()

    def launch(self, stream: SideStream) -> BufferReduction:
        """Send the buffer; parameters without a gradient on this rank are sent as zeros."""
        assert self._send is not None
        send, written = self._send, self._written
        self.discard()
        for parameter in self._parameters:
            if parameter not in written:
                self._place(send, parameter).zero_()
        result = torch.empty(self._size, dtype=self._dtype, device=send.device)
        if self._ranks == 1:
            result = send[0].to(self._dtype)
            pending = Pending()
        elif send.dtype == self._dtype:
            pending = self._reduce_scatter(send, result, stream)
        else:
            pending = self._exchange(send, result, stream)
        rows = []
        for parameter in self._parameters:
            start = self._starts[parameter]
            shape = parameter.shard.shape
            rows.append((parameter, result[start : start + shape.numel()].view(shape)))
        return BufferReduction(pending, rows, written)

    def _reduce_scatter(self, send: Tensor, result: Tensor, stream: SideStream) -> Pending:
        def keep_own() -> None:
            result.copy_(slice_of(send, self._process_group.rank(), self._ranks))

        return stream.run(lambda: reduce_scatter_mean([send], self._process_group), after=keep_own)

    def _exchange(self, send: Tensor, result: Tensor, stream: SideStream) -> Pending:
        transport = self.transport
        receive = transport.receive_buffer(send)

        def add_up() -> None:
            torch.mean(receive, dim=0, dtype=self._dtype, out=result)

        return stream.run(lambda: transport.exchange(receive, send), after=add_up)

    def _shard_size(self, parameter: ShardedParameter) -> int:
        return parameter.padded_shape.numel() // self._ranks

    def _place(self, send: Tensor, parameter: ShardedParameter) -> Tensor:
        """The parameter's rows in the buffer, by destination: (ranks, elements of a shard)."""
        start = self._starts[parameter]
        return send[:, start : start + self._shard_size(parameter)]


def _copy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)`; between rows of one dtype in words of 16 bytes, which strided copies are fast for."""
    elements = 16 // source.element_size()
    if target.dtype == source.dtype and source.shape[-1] % elements == 0 and source.storage_offset() % elements == 0:
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    target.copy_(source)


class ReplicatedGradients:
    """Gradients of replicated parameters, averaged in one flat call, and with them which parameters were used at all.

    A parameter that no rank used keeps no gradient, as without sharding; one that some rank used has one on every rank.
    """

    def __init__(self, parameters: Iterable[ShardedParameter], process_group: dist.ProcessGroup) -> None:
        self._trainable = [parameter for parameter in parameters if parameter.trainable]
        self._replicated = [parameter for parameter in self._trainable if parameter.rows is None]
        self._process_group = process_group
        self._gradients: dict[ShardedParameter, Tensor] = {}
        wide = any(parameter.shard.dtype == torch.float64 for parameter in self._replicated)
        self._dtype = torch.float64 if wide else torch.float32

    def add(self, parameter: ShardedParameter, gradient: Tensor) -> None:
        """Keep a gradient, or add it up in the wide dtype."""
        before = self._gradients.get(parameter)
        self._gradients[parameter] = gradient if before is None else before.to(self._dtype) + gradient

    def discard(self) -> None:
        """Forget what has not been averaged."""
        self._gradients = {}

    def reduce(self, used: set[ShardedParameter], device: torch.device) -> set[ShardedParameter]:
        """Attach the means over the ranks. Returns the parameters that some rank used.

        The host waits for the device only if this rank left a parameter unused and must ask about it.
        """
        count = sum(parameter.shape.numel() for parameter in self._replicated)
        flat = torch.zeros(count + len(self._trainable), dtype=self._dtype, device=device)
        *means, flags = flat.split([*(parameter.shape.numel() for parameter in self._replicated), len(self._trainable)])
        places = dict(zip(self._replicated, means, strict=True))
        if self._gradients:
            torch._foreach_copy_(
                [places[parameter] for parameter in self._gradients],
                [gradient.reshape(-1) for gradient in self._gradients.values()],
            )
        self.discard()
        all_used = len(used) == len(self._trainable)
        if all_used:
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor([float(parameter in used) for parameter in self._trainable]))
        if self._process_group.size() > 1:
            all_reduce_mean([flat], self._process_group).wait()
        if not all_used:
            used = {parameter for parameter, flag in zip(self._trainable, flags.tolist(), strict=True) if flag > 0}
        for parameter, mean in places.items():
            if parameter in used:
                parameter.attach_gradient(mean.view(parameter.shape).to(parameter.shard.dtype))
        return used
