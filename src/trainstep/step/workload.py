"""A workload: what is trained. A model, its batches, its loss and its optimizer — ours, or the user's.

Everything else in trainstep takes a `WorkloadSource` and builds from it as often as it needs, each time from the same
seed, because comparing two settings means starting twice from the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.config import FIXED, AttentionImpl, ModelConfig, OptimizerImpl, StepConfig, settings_with
from trainstep.base.errors import UnsupportedError, UsageError, place_of
from trainstep.base.precision import PRECISIONS, PrecisionName
from trainstep.step.model.text import MAX_TEXT_BYTES, load_tokens, token_batches
from trainstep.step.model.transformer import (
    Transformer,
    TransformerBlock,
    build_transformer,
    chunked_cross_entropy,
    cross_entropy,
)
from trainstep.step.randomness import seed_everything
from trainstep.step.rebuilding import Factory


def call_with_first(module: nn.Module, batch: Any) -> Any:
    """The default forward: the batch is a tuple whose first element is the module's input."""
    return module(batch[0])


EXPECTED = "a trainstep.Workload(module=…, batches=…, loss=…, optimizer=…)"


@dataclass
class Workload:
    """A model to train and everything a step of it needs.

    A step is `loss(forward(module, batch), batch).backward()`, then the optimizer. Tensors in a batch (a tensor, or
    tuples, lists and dicts of them) are moved to the device before the step.
    """

    module: nn.Module
    """The model, on any device; its weights in float32, or all or some in bf16, which are then trained as they are."""
    batches: Iterable[Any]  # batches, preferably endless; a finite iterable is started again
    loss: Callable[[Any, Any], Tensor]  # (forward's result, batch) → scalar
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """Makes the optimizer from the parameters, e.g. `functools.partial(torch.optim.AdamW, lr=3e-4)`."""
    forward: Callable[[nn.Module, Any], Any] = call_with_first
    """(module, batch) → what the loss takes; by default module(batch[0])."""
    validation: Iterable[Any] | None = None
    """Batches that `trainstep train` validates on, with the same forward and loss, the module in eval mode; every
    validation starts at the first. None: there is no validation."""

    def __post_init__(self) -> None:
        """Raise `UsageError` where a part is of another kind, such as an optimizer that is made already."""
        if not isinstance(self.module, nn.Module):
            raise UsageError(f"a Workload's module is a {type(self.module).__name__}; expected an nn.Module")
        given = {"batches": self.batches, **({} if self.validation is None else {"validation": self.validation})}
        for name, batches in given.items():
            if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
                raise UsageError(f"a Workload's {name} are a {type(batches).__name__}; expected a list or a loader")
        for name in ("loss", "optimizer", "forward"):
            part = getattr(self, name)
            if not callable(part):
                hint = ", such as functools.partial(torch.optim.AdamW, lr=3e-4)" if name == "optimizer" else ""
                raise UsageError(f"a Workload's {name} is a {type(part).__name__}; expected a function{hint}")


@dataclass(frozen=True)
class WorkloadSource:
    """Source of workloads; called anew for every setting that is measured."""

    name: str  # for tables and file names
    build: Callable[[StepConfig], Workload]
    """Builds the workload. Ours obey the step's attention, loss, batch and context; of these, a user's obeys attention
    alone, and only where it differs from the default, which stands for what the model itself calls."""
    model: ModelConfig | None = None  # the shape of the built-in model; None for a user's

    @property
    def is_builtin(self) -> bool:
        """True if the model is ours, so that its attention, loss, batch and context can be chosen."""
        return self.model is not None

    @cached_property
    def own_precision(self) -> PrecisionName:
        """Precision of training where none is asked for: fp32, or bf16-pure where its weights come in bf16.

        A user's workload is built to see.
        """
        return "fp32" if self.is_builtin or not has_bf16_weights(self.build(StepConfig()).module) else "bf16-pure"


def has_bf16_weights(module: nn.Module) -> bool:
    """True if weights of the module are in bf16, trained ones or frozen."""
    return any(parameter.dtype == torch.bfloat16 for parameter in module.parameters())


def builtin_source(name: str, model: ModelConfig, data: Path | None = None) -> WorkloadSource:
    """The built-in Transformer on text or token files (`data`; None: the standard library's source)."""
    return WorkloadSource(name, functools.partial(_build_builtin, model, data), model)


def _build_builtin(model: ModelConfig, data: Path | None, step: StepConfig) -> Workload:
    tokens = load_tokens(data, model.vocab_size, max_text_bytes=MAX_TEXT_BYTES)
    batches = token_batches(tokens, batch=step.batch, context=step.context, vocab_size=model.vocab_size, seed=step.seed)
    return builtin_workload(model, step, batches)


def builtin_workload(model: ModelConfig, step: StepConfig, batches: Iterable[tuple[Tensor, Tensor]]) -> Workload:
    """The built-in Transformer, its weights from the step's seed, on batches of (inputs, targets).

    Raises `UsageError` where the step's context is longer than the model takes.
    """
    model.require_context(step.context)
    fitted = dataclasses.replace(model, max_context=step.context)  # the rotary tables need not be longer
    device = resolve_device(step.device)
    seed_everything(step.seed)
    module = build_transformer(fitted, impl=step.attention, block=_block(step, device), device=device)
    by_head = {"chunked": _chunked_loss, "fused": _fused_loss}.get(step.loss)  # computes the logits itself
    return Workload(
        module=module,
        batches=batches,
        loss=functools.partial(by_head, module) if by_head else _dense_loss,
        optimizer=functools.partial(make_optimizer, step.optimizer, step.learning_rate),
        forward=_hidden_states if by_head else call_with_first,
    )


def _block(step: StepConfig, device: torch.device) -> type[TransformerBlock]:
    """The class of the blocks; raises `UnsupportedError` where fused operators are asked for and do not run."""
    if step.loss != "fused" and step.fused == "none":
        return TransformerBlock
    from trainstep.fused.operators import require_device  # here: they load Triton
    from trainstep.step.model.fused import FusedBlock

    require_device("a step with fused operators", device)
    return FusedBlock if step.fused == "rope" else TransformerBlock


def _dense_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(logits, batch[1])


def _chunked_loss(module: Transformer, hidden: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return chunked_cross_entropy(hidden, module.head, batch[1])


def _fused_loss(module: Transformer, hidden: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    from trainstep.fused import linear_cross_entropy  # here: it loads Triton

    return linear_cross_entropy(hidden, module.head, batch[1])


def _hidden_states(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return module(batch[0], return_hidden=True)


def make_optimizer(
    impl: OptimizerImpl, learning_rate: float, parameters: Iterable[nn.Parameter], *, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """The optimizer of a `StepConfig`: AdamW with betas (0.9, 0.95), or plain SGD, which has no weight decay."""
    if impl == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate)
    fused = impl == "adamw-fused"
    return torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=fused, foreach=not fused
    )


def factory_source(spec: str) -> WorkloadSource:
    """The source behind `--workload package.module:factory`; modules in the working directory are found too.

    Raises:
        UsageError: the spec is malformed, the import or the factory fails, or the factory returns no `Workload`.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"--workload is {spec!r}; expected package.module:factory, such as my_project.train:workload")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").lstrip("./").replace("/", ".")
        raise UsageError(f"--workload is {spec!r}, a file; expected a module's name, such as {dotted}:{attribute}")
    if str(Path.cwd()) not in sys.path[:1]:
        sys.path.insert(0, str(Path.cwd()))  # to stay, for what the factory itself imports when it is called
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise UsageError(f"--workload {spec}: importing it failed: {_last_line(error)}") from error
    if not callable(factory):
        raise UsageError(f"--workload {spec}: {attribute} is a {type(factory).__name__}, expected a function")
    return WorkloadSource(spec, functools.partial(_build_from_factory, spec, Factory(factory)))


def _build_from_factory(spec: str, factory: Factory, step: StepConfig) -> Workload:
    for name in settings_with(FIXED):
        if getattr(step, name) != getattr(StepConfig(), name):
            raise UnsupportedError(f"--workload {spec} fixes its own {name.replace('_', '-')}; leave that flag out")
    if step.optimizer not in (StepConfig().optimizer, "adamw-fused"):
        raise UnsupportedError(
            f"--workload {spec} brings its own optimizer, so --optimizer {step.optimizer} cannot replace it; leave "
            "that flag out, or ask for the fused form of its own with adamw-fused"
        )
    try:
        workload = factory(step.seed)
    except UsageError as error:
        raise UsageError(f"--workload {spec}: {error}") from error
    except Exception as error:
        raise UsageError(f"--workload {spec}: the factory failed: {_last_line(error)}") from error
    if not isinstance(workload, Workload):
        kind = type(workload).__name__
        raise UsageError(f"--workload {spec}: the factory returned a {kind}, expected {EXPECTED}")
    if not PRECISIONS[step.precision].is_stored_half:
        # Precision is applied from outside: trained weights of another dtype would be measured under a false name.
        for name, parameter in workload.module.named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UsageError(
                    f"--workload {spec}: parameter {name} is {dtype}; expected float32, which --precision bf16-pure "
                    "casts to bf16, and bf16 and fp16 compute with under autocast; or bf16, which is trained as it is"
                )
    if step.attention != StepConfig().attention:
        workload.forward = functools.partial(_forward_with_attention, workload.forward, step.attention)
    return workload


def _forward_with_attention(forward: Callable[..., Any], impl: AttentionImpl, module: nn.Module, batch: Any) -> Any:
    """The user's forward, with the model's own calls of scaled_dot_product_attention sent to `impl`."""
    from trainstep.attention.api import sdpa_replaced

    with sdpa_replaced(impl) as seen:
        outputs = forward(module, batch)
    if seen.calls or torch.compiler.is_compiling():
        return outputs
    if all(child._compiled_call_impl is None for child in module.modules()):  # else a call is seen while traced only
        raise UnsupportedError("the model never calls torch.nn.functional.scaled_dot_product_attention")
    return outputs


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}{place_of(error)}"


def resolve_device(name: str) -> torch.device:
    """The torch device of `StepConfig.device`; raises `UsageError` where this machine has no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device is {name!r}; expected auto, cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UsageError(f"device is {name!r}; trainstep measures on cpu and cuda")
    if (device.index or 0) >= (count := torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = f"{count} CUDA devices" if count else "no CUDA device"
        raise UsageError(f"device is {name!r}, but this machine has {found}; use --device auto")
    return device
