"""`trainstep memory --residuals`: what forward keeps for backward, by module and operation, as rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.measure.dtypes import short_name
from trainstep.measure.environment import describe
from trainstep.measure.memory import MIB, LiveStorages, Residual, Residuals, residual_stream_bytes, residuals
from trainstep.measure.outcome import Failure, attempt, failed_row
from trainstep.measure.step import case_columns
from trainstep.rows import ResidualRow
from trainstep.step.batches import map_tensors, tensors_of
from trainstep.step.blocks import find_blocks, without_numbers
from trainstep.step.training_step import TrainingStep, build_step, uncompiled
from trainstep.step.workload import WorkloadSource, resolve_device

TOP = 5
"""The largest groups that are rows of their own."""


@dataclasses.dataclass(frozen=True)
class KeptByStep:
    """Tensors that the forward pass of a training step saves."""

    whole: Residuals
    first_block: Residuals
    """The part of it that the first block keeps; empty where there are no blocks, or compiled code hides them."""
    stream: Tensor | None
    """Input of the first block: the residual stream, without its data."""


def measure_residuals(source: WorkloadSource, config: StepConfig) -> KeptByStep:
    """Build the workload and run its forward pass and loss once.

    Raises:
        UnsupportedError: checkpointing that keeps results where autograd does not see them.
    """
    if config.checkpointing == "selective" or config.checkpointing.startswith("@"):
        raise UnsupportedError(
            f"what checkpointing={config.checkpointing} keeps is invisible to autograd; use --checkpointing none"
        )
    step = build_step(source, config)
    batch = step.next_batch()
    forward = partial(step.differentiable_loss, batch)
    if config.compile != "off":  # no module in it runs its hooks
        found, _ = residuals(forward, None, [*tensors_of(batch), *step.module.parameters(), *step.module.buffers()])
        return KeptByStep(found, Residuals(()), None)
    seen: list[Any] = []
    blocks = find_blocks(step.module)
    for block in blocks[:1]:
        block.register_forward_pre_hook(lambda block, args: seen.extend(args[:1]))
    found, _ = residuals(forward, step.module, tensors_of(batch))
    stream = torch.empty_like(seen[0], device="meta") if seen and isinstance(seen[0], Tensor) else None
    return KeptByStep(found, _inside(found, step.module, blocks[:1]), stream)


def _inside(found: Residuals, module: nn.Module, blocks: Sequence[nn.Module]) -> Residuals:
    """The part of it that these blocks keep."""
    names = [f"{name}." for name, each in module.named_modules() if any(each is block for block in blocks)]
    return Residuals(tuple(each for each in found.kept if f"{each.module}.".startswith(tuple(names))))


@dataclasses.dataclass(frozen=True)
class BlockGradients:
    """Bytes in the backward of one block."""

    block: str  # its name; empty for the first
    freed: int  # what forward kept for it
    change: int  # of the memory in use, from before the block's backward to after it
    expected: int  # of its trained parameters

    @property
    def made(self) -> int:
        """Gradients: what memory grew by beside what was freed."""
        return self.change + self.freed


def measure_gradients(source: WorkloadSource, config: StepConfig) -> BlockGradients:
    """Take one eager forward and backward, and see what memory one block's backward frees and takes.

    It is the first block whose input needs a gradient: behind a frozen embedding, as LoRA's, that is the second.

    Raises:
        UnsupportedError: checkpointing of several blocks together, no blocks, or none whose input needs a gradient.
    """
    if config.checkpointing not in ("none", "every-1"):
        raise UnsupportedError(
            f"checkpointing={config.checkpointing} has no backward of one block; use --policies none or every-1"
        )
    step, batch, blocks = _eager_blocks(source, config)
    device = next(step.module.parameters()).device
    resident = [*tensors_of(batch), *step.module.parameters(), *step.module.buffers()]
    live = None if device.type == "cuda" else LiveStorages(resident)
    held: list[int] = []
    watched: list[nn.Module] = []

    def note(gradient: Tensor) -> None:
        asked_for = torch.cuda.memory_stats(device)["requested_bytes.all.current"] if live is None else live.bytes
        held.append(asked_for)

    def watch(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Backward is at the block when it has its output's gradient, and through when it has its input's."""
        ends = tensors_of(output)[0], tensors_of((args, kwargs))[0]
        if not watched and all(each.requires_grad for each in ends):
            watched.append(block)
            for each in ends:
                each.register_hook(note)

    for each in blocks:
        each.register_forward_hook(watch, with_kwargs=True)
    with uncompiled(), live or contextlib.nullcontext():
        found, loss = residuals(partial(step.differentiable_loss, batch), step.module, tensors_of(batch))
        if not watched:
            raise UnsupportedError("no block's gradients are seen, as no block's input needs a gradient")
        loss.backward()
    name = "" if watched == blocks[:1] else next(n for n, each in step.module.named_modules() if each is watched[0])
    expected = sum(each.nbytes for each in watched[0].parameters() if each.requires_grad)
    return BlockGradients(name, _inside(found, step.module, watched).bytes, held[1] - held[0], expected)


def measure_compiled_block(source: WorkloadSource, config: StepConfig) -> Residuals:
    """Tensors that the first block saves when it is compiled by itself and called with what it gets in the model.

    Raises:
        UnsupportedError: the module has no blocks, or the block was not called while it was looked for.
    """
    step, batch, blocks = _eager_blocks(source, dataclasses.replace(config, checkpointing="none"))
    found: list[Residuals] = []

    def measure(block: nn.Module, args: Any, kwargs: Any) -> None:
        """In the place of the call: later the caches and flags that it is called with may be other ones."""
        handle.remove()
        args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))
        compiled = torch.compile(block)
        resident = [*step.module.parameters(), *step.module.buffers()]
        with torch.compiler.set_stance("default"):
            found.append(residuals(lambda: compiled(*args, **kwargs), None, resident)[0])
        raise _Measured

    handle = blocks[0].register_forward_pre_hook(measure, with_kwargs=True)
    with contextlib.suppress(_Measured), uncompiled():  # else the hook would be a part of what the workload compiles
        step.differentiable_loss(batch)
    if not found:
        raise UnsupportedError("the model does not call its first block")
    return found[0]


def _eager_blocks(source: WorkloadSource, config: StepConfig) -> tuple[TrainingStep, Any, list[nn.Module]]:
    """Build an eager step; return it with its first batch and its blocks."""
    step = build_step(source, dataclasses.replace(config, compile="off"))
    blocks = find_blocks(step.module)
    if not blocks:
        raise UnsupportedError(f"{source.name} has no blocks in an nn.ModuleList")
    return step, step.next_batch(), blocks


class _Measured(Exception):
    """Ends a forward pass of which the rest would find its caches filled."""


def residual_records(source: WorkloadSource, config: StepConfig) -> Iterator[ResidualRow]:
    """The largest groups of the step and of its first block, eager and compiled, the stream, a block's gradients."""
    environment = describe(resolve_device(config.device))

    def rows(measure: Any, rows_of: Any, part: str, group: str = "all", **changes: Any) -> Iterator[ResidualRow]:
        each = dataclasses.replace(config, **changes)
        case, found = case_columns(source, each), attempt(partial(measure, source, each))
        if isinstance(found, Failure):
            yield failed_row(ResidualRow, case | {"part": part, "group": group}, found, environment)
        else:
            yield from rows_of(found, case | {"environment": environment})

    for compile in dict.fromkeys((config.compile, "model")):
        yield from rows(measure_residuals, partial(_kept_rows, source, config), "step", compile=compile)
    yield from rows(measure_gradients, _gradient_rows, "first block's backward", "gradients", compile="off")
    alone = {"compile": "blocks", "checkpointing": "none"}
    yield from rows(measure_compiled_block, partial(_group_rows, "first block"), "first block", **alone)


def _kept_rows(
    source: WorkloadSource, config: StepConfig, kept: KeptByStep, own: Mapping[str, Any]
) -> Iterator[ResidualRow]:
    """Groups of the step and of its first block, and the residual stream beside its formula."""
    yield from _group_rows("step", kept.whole, own)
    if kept.first_block.kept:
        yield from _group_rows("first block", kept.first_block, own)
    if (stream := kept.stream) is not None:
        model, size = source.model, stream.element_size()
        formula = residual_stream_bytes(config.batch, config.context, model.d_model, size) / MIB if model else None
        own = {**own, "part": "residual stream", "group": "input of the first block", "formula_mib": formula}
        yield ResidualRow(**own, tensor=_tensor(stream.dtype, stream.shape), storages=1, mib=stream.nbytes / MIB)


def _gradient_rows(found: BlockGradients, own: Mapping[str, Any]) -> Iterator[ResidualRow]:
    """Changes of memory over one block's backward, and the gradients that it therefore makes."""
    own = {**own, "part": f"{found.block or 'first block'}'s backward"}
    yield ResidualRow(**own, group="change of memory", mib=found.change / MIB)
    yield ResidualRow(**own, group="gradients", mib=found.made / MIB, formula_mib=found.expected / MIB)


def _group_rows(part: str, found: Residuals, own: Mapping[str, Any]) -> Iterator[ResidualRow]:
    """The largest groups of alike residuals, the rest, and all, with their share."""
    groups: dict[tuple[str, str, str], list[Residual]] = {}
    for each in found.kept:
        outside = "(compiled code)" if each.operation == "CompiledFunction" else "(outside modules)"
        where = without_numbers(each.module) or outside
        groups.setdefault((where, each.operation, _tensor(each.dtype, each.shape)), []).append(each)

    def size(members: Sequence[Residual]) -> int:
        return sum(each.bytes for each in members)

    def row(group: str, members: Sequence[Residual], **more: Any) -> ResidualRow:
        share = size(members) / found.bytes if found.bytes else None
        more |= {"storages": len(members), "mib": size(members) / MIB, "share": share}
        return ResidualRow(**own, part=part, group=group, **more)

    ordered = sorted(groups.items(), key=lambda item: -size(item[1]))
    for rank, ((module, operation, tensor), members) in enumerate(ordered[:TOP], start=1):
        yield row("largest", members, rank=rank, module=module, operation=operation, tensor=tensor)
    if rest := [each for _, members in ordered[TOP:] for each in members]:
        yield row("the rest", rest)
    yield row("all", found.kept)


def _tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{short_name(dtype)} {'×'.join(map(str, shape))}"
