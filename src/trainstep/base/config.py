"""Settings of a measurement: a model's shape, how one training step of it is taken, and the phases it announces.

Everything that can be chosen is a field here, once, with its default and its docstring. The command's flags, the TOML
files and the grids of `trainstep bench` are made from these dataclasses. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.files import read_toml
from trainstep.base.operators import AttentionImpl as AttentionImpl
from trainstep.base.precision import PrecisionName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CompileMode = Literal["off", "blocks", "blocks-recompute", "model"]
LossImpl = Literal["dense", "chunked", "fused"]
FusedParts = Literal["none", "rope"]
OptimizerImpl = Literal["adamw-foreach", "adamw-fused", "sgd"]
StepMode = Literal["forward", "forward-backward", "step"]

# A step announces its phases once, as `with phase("forward"): ...`, and every instrument hears them. What `phase` is
# decides what is measured: the stopwatch's laps, the memory instrument's peaks, both at once, or nothing.
PHASES = ("forward", "loss", "backward", "optimizer")
"""In order. `optimizer` includes gradient unscaling and setting the gradients to None."""

PHASES_OF_MODE: dict[StepMode, tuple[str, ...]] = {
    "forward": ("forward",),
    "forward-backward": ("forward", "loss", "backward"),
    "step": PHASES,
}

PhaseContext = Callable[[str], AbstractContextManager[Any]]
"""Given a phase's name, the context in which that phase runs."""


def no_phases(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def together(*contexts: PhaseContext) -> PhaseContext:
    """Enter several instruments' contexts around each phase, the first outermost."""

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(name))
            yield

    return phase


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the built-in decoder-only Transformer: pre-norm RMSNorm, RoPE, SwiGLU, untied head, no biases."""

    vocab_size: int = 10_000
    """Number of token ids."""
    d_model: int = 128
    """Width of the residual stream."""
    d_ff: int = 512
    """Inner width of the SwiGLU feed-forward."""
    num_layers: int = 4
    """Number of Transformer blocks."""
    num_heads: int = 4
    """Attention heads per block; head_dim is d_model / num_heads."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    max_context: int = 131_072
    """Longest sequence the model accepts, in tokens."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0 < (value := getattr(self, field.name)) < math.inf:
                raise UsageError(f"{field.name} is {value}; expected a positive number")
        if self.d_model % self.num_heads:
            raise UsageError(
                f"d_model {self.d_model} does not divide into {self.num_heads} heads; "
                f"choose num_heads among the divisors of {self.d_model}"
            )
        # Rotary positions turn features in pairs, so an odd one would have no partner.
        if self.head_dim % 2:
            raise UsageError(
                f"head_dim is {self.head_dim} (d_model {self.d_model} / num_heads {self.num_heads}); "
                "rotary positions turn pairs of features, so choose sizes that make it even"
            )

    def require_context(self, context: int) -> None:
        """Raise `UsageError` where sequences are longer than the model takes."""
        if context > self.max_context:
            too_long = f"context {context} is longer than the model's max_context {self.max_context}"
            raise UsageError(f"{too_long}; choose a context up to {self.max_context}")

    @property
    def head_dim(self) -> int:
        """Features per attention head."""
        return self.d_model // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Exact number of parameters in embedding, blocks (4 attention, 3 SwiGLU matrices, 2 norms), norm and head."""
        block = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return self.num_layers * block + 2 * self.vocab_size * self.d_model + self.d_model


_OF_ANY_YEAR = {
    "tiny": ModelConfig(),
    "small": ModelConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "medium": ModelConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
    "large": ModelConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
    "2.7B": ModelConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
    "8B": ModelConfig(vocab_size=151_936, d_model=4096, d_ff=11008, num_layers=34, num_heads=32),
    "10B": ModelConfig(d_model=4608, d_ff=12288, num_layers=50, num_heads=36),
}
_YEARS: Mapping[str, Mapping[str, ModelConfig]] = {
    "2025": {name: _OF_ANY_YEAR[name] for name in ("small", "medium", "large", "2.7B")}
    | {"xl": ModelConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25)},
    "2026": {name: _OF_ANY_YEAR[name] for name in ("small", "medium", "large", "10B", "8B")}
    | {"xl": _OF_ANY_YEAR["2.7B"]},
}
SIZES: Mapping[str, ModelConfig] = _OF_ANY_YEAR | {
    f"{year}/{name}": model for year, models in _YEARS.items() for name, model in models.items()
}
"""The named sizes. small, medium and large have GPT-2's shapes. A name with a year is the model that this year's
handout of CS336's assignment 2 gives the name, 2026/8B that of its leaderboard. xl has no entry without a year, as the
two handouts give that name to two models."""

SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")
"""The fields of a model that tables show beside its name."""
SHAPE_TITLE = "d_model × d_ff × layers × heads"


def shape_of(name: str) -> str | None:
    """`2560×10240×32×32`: the `SHAPE` of a built-in model by the name that rows have; None of any other name.

    Such a name is a size, or a file's stem, and the fields that differ from it, as `small d_ff=2048`.
    """
    size, *words = name.split(" ")
    known = dict(vars(SIZES[size])) if size in SIZES else {}
    known |= dict(word.split("=", 1) for word in words if "=" in word)
    return "×".join(str(known[field]) for field in SHAPE) if known.keys() >= set(SHAPE) else None


CASE, FORM, FIXED, RESUMABLE = "case", "form", "fixed", "resumable"
"""Roles of a step's settings: the case of a result; how the same training is computed, which a ladder changes; what a
user's workload sets itself; what may differ when a run is resumed, as the loss curve does not depend on it."""


def settings_with(role: str, *, without: Collection[str] = ()) -> tuple[str, ...]:
    """The fields of `StepConfig` whose annotations carry a role, in order."""
    hints = typing.get_type_hints(StepConfig, include_extras=True)
    return tuple(name for name, hint in hints.items() if role in typing.get_args(hint)[1:] and name not in without)


@dataclass(frozen=True)
class StepConfig:
    """Settings of one training step. The defaults are the plain baseline: fp32, eager, nothing fused."""

    batch: Annotated[int, CASE, FIXED, RESUMABLE] = 4
    """Sequences per step; under `trainstep train` those of one rank in one pass."""
    context: Annotated[int, CASE, FIXED] = 512
    """Tokens per sequence."""
    precision: Annotated[PrecisionName, CASE, FORM] = "fp32"
    """fp32; tf32 (fp32 storage, TF32 matmuls); bf16 or fp16 autocast over fp32 weights; bf16-pure (weights, gradients
    and optimizer state in bf16). A workload whose weights come in bf16 is by default measured as bf16-pure. Every
    other precision then trains a float32 copy of its weights."""
    compile: Annotated[CompileMode, CASE, FORM, RESUMABLE] = "off"
    """torch.compile: off, each block on its own (blocks), or the whole model. With blocks-recompute, backward
    recomputes norms and other operations without matmuls, so that less is kept."""
    graph: Annotated[Literal["off", "step"], CASE, FORM, RESUMABLE] = "off"
    """CUDA graphs: off, or the step, whose kernels the host then launches at once (on a GPU, with batches of one
    shape). Of use where launches set the pace."""
    attention: Annotated[AttentionImpl, CASE, FORM, RESUMABLE] = "eager"
    """Attention implementation (our models). An explicit choice never falls back to another."""
    loss: Annotated[LossImpl, CASE, FORM, FIXED, RESUMABLE] = "dense"
    """Cross-entropy: dense (all logits at once), chunked or fused, which never hold the logits in full. Chunked
    computes head and loss over slices of tokens, which backward recomputes. Fused takes our kernel on a GPU, with the
    gradients in forward."""
    fused: Annotated[FusedParts, CASE, FORM, FIXED, RESUMABLE] = "none"
    """Fused operators in place of plain ones (our models, on a GPU): rope (the rotary positions of queries and keys, in
    one pass)."""
    checkpointing: Annotated[str, CASE, RESUMABLE] = "none"
    """Saved tensors: none (no checkpointing, all are saved), every-1 (the input of every block, which runs again in
    backward), selective (results of matmuls and attention), or @FILE. A file has a policy for each block, as
    trainstep memory --fit writes it."""
    optimizer: Annotated[OptimizerImpl, CASE, FORM] = "adamw-foreach"
    """AdamW updating lists of tensors (foreach), AdamW in fused kernels, or plain SGD."""
    learning_rate: Annotated[float, FIXED] = 3e-4
    """Learning rate: constant, or the peak of `trainstep train`'s schedule."""
    device: Annotated[str, RESUMABLE] = "auto"
    """auto (a GPU when there is one), cpu, cuda or cuda:N."""
    seed: Annotated[int, CASE] = 0
    """Seed of the weights and of the order of the data."""

    def __post_init__(self) -> None:
        for name in ("batch", "context", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; expected a positive number")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed is {self.seed}; expected 0 or more, and less than 2^64")
        check_policy(self.checkpointing)

    def require_kernels(self) -> None:
        """Raise `UnsupportedError` where a CUDA graph hides the operators that an instrument looks at."""
        if self.graph != "off":
            raise UnsupportedError("a CUDA graph hides the operators of a step from this instrument; leave --graph off")


EVERY_BLOCK = "every-1"
"""The checkpointing that computes every block again in backward: the same numbers from less memory."""
POLICIES = ("none", EVERY_BLOCK, "selective")
"""Checkpointing that treats all blocks alike."""


def check_policy(policy: str) -> None:
    """Raise `UsageError` unless this names a checkpointing policy."""
    if policy in POLICIES or (policy.startswith("@") and len(policy) > 1):
        return
    is_gone = policy == "recursive" or policy.startswith("every-")
    gone = f"; policies of several blocks saved no memory and are gone, use {EVERY_BLOCK}" if is_gone else ""
    raise UsageError(f"checkpointing is {policy!r}; expected {', '.join(POLICIES)} or @FILE{gone}")


def keeps_whole_blocks(policy: str) -> bool:
    """True if a checkpointing policy keeps all of a block's activations or its input alone, which formulas know."""
    return policy in ("none", EVERY_BLOCK)


def resolve_size(name: str) -> ModelConfig:
    """The `ModelConfig` of a named size, or of a TOML file's `[model]` table.

    Raises:
        UsageError: no such size, a name of two sizes, no such file, or a file that does not describe a model.
    """
    if name in SIZES:
        return SIZES[name]
    if name.endswith(".toml"):
        return load_toml(Path(name)).model
    # A name that each year gives another model is refused, as either guess would measure the wrong one.
    if ofs := [f"{year}/{name}" for year, models in _YEARS.items() if name in models]:
        told = " or ".join(f"{each} ({shape_of(each)})" for each in ofs)
        raise UsageError(f"size {name!r} is another model in each year: {told}, {SHAPE_TITLE}; give one with its year")
    raise UsageError(f"unknown size {name!r}; expected one of {', '.join(SIZES)} or a path ending in .toml")


@dataclass(frozen=True)
class FileConfig:
    """Contents of a TOML file: `[model]` (with an optional `size` to start from), `[step]` and `[train]`."""

    model: ModelConfig
    step: StepConfig
    train: Mapping[str, Any]  # as it stands there; `trainstep.train` knows its fields


def load_toml(path: Path) -> FileConfig:
    """The file at `path`; what it leaves out keeps its default.

    Raises:
        UsageError: unreadable file, invalid TOML, an unknown key, or a value of the wrong type.
    """
    tables = read_toml(path, dict[str, Any], "the configuration ")
    if unknown := sorted(set(tables) - {"model", "step", "train"}):
        raise UsageError(f"{path}: unknown table or key {unknown[0]!r}; expected [model], [step] and [train]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name} is {table!r}; expected a table, written [{name}]")
    model = dict(tables.get("model", {}))
    if (size := str(model.pop("size", "tiny"))).endswith(".toml"):
        raise UsageError(f"{path} [model]: size is {size!r}; expected a named size, not another file")
    base = resolve_size(size)
    return FileConfig(
        model=replace_checked(base, model, where=f"{path} [model]"),
        step=replace_checked(StepConfig(), tables.get("step", {}), where=f"{path} [step]"),
        train=tables.get("train", {}),
    )


Config = TypeVar("Config", bound="DataclassInstance")


def replace_checked(base: Config, values: Mapping[str, Any], where: str) -> Config:
    """The configuration `base` with `values`; `UsageError` for an unknown key, a wrong type, or one out of range."""
    hints = typing.get_type_hints(type(base))
    for name, value in values.items():
        if name not in hints:
            raise UsageError(f"{where}: unknown key {name!r}; expected one of {', '.join(hints)}")
        check_value(hints[name], value, where=f"{where} {name}")
    try:
        return dataclasses.replace(base, **values)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def check_value(hint: Any, value: object, where: str) -> None:
    """Raise `UsageError` unless `value` fits the annotation of a configuration field."""
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            raise UsageError(f"{where} is {value!r}; expected one of {', '.join(map(repr, typing.get_args(hint)))}")
        return
    # Python takes True for 1: a truth value passes only where one is asked for.
    kinds = (int, float) if hint is float else hint
    if not isinstance(value, kinds) or isinstance(value, bool) is not (hint is bool):
        raise UsageError(f"{where} is {value!r}; expected a value of type {getattr(hint, '__name__', hint)}")
