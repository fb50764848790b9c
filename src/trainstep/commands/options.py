"""What several commands take: the model, the step, and where they come from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import FlagCreatePairsOff

from trainstep.config import ModelConfig, StepConfig, load_toml, resolve_size
from trainstep.errors import UsageError

if TYPE_CHECKING:
    from trainstep.workload import WorkloadSource


@dataclass(frozen=True)
class ModelFlags(ModelConfig):
    """The shape of the built-in decoder-only Transformer: pre-norm RMSNorm, RoPE, SwiGLU, untied head, no biases."""

    def __post_init__(self) -> None:
        """Left unchecked while flags are parsed, so that the parser does not wrap our one-line errors."""

    def checked(self) -> ModelConfig:
        """The configuration, checked."""
        return ModelConfig(**vars(self))


@dataclass(frozen=True)
class StepFlags(StepConfig):
    """How one training step is taken. The defaults are the plain baseline: fp32, eager, nothing fused."""

    def __post_init__(self) -> None:
        """Left unchecked, as above."""

    def checked(self) -> StepConfig:
        """The configuration, checked."""
        return StepConfig(**vars(self))


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    debug: FlagCreatePairsOff[bool] = False
    """Show the traceback of an error, and of every case that fails."""


@dataclass(frozen=True, kw_only=True)
class BuiltinModel(Common):
    """Commands that take one of our models."""

    size: str | None = None
    """Named size (tiny, small, medium, large, xl, 2.7B, 10B) or a .toml file with a [model] table; by default tiny, or
    small where there is a GPU. The model's own flags change it further."""
    config: Path | None = None
    """TOML file with [model] and [step] tables, as defaults for the flags."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    model: ModelFlags = field(default_factory=ModelFlags)
    step: StepFlags = field(default_factory=StepFlags)

    def model_name(self) -> str:
        """The size's name, with what other flags changed of it."""
        base, _ = preset(self.size, self.config)
        changed = [
            f"{each.name}={getattr(self.model, each.name)}"
            for each in dataclasses.fields(ModelConfig)
            if getattr(self.model, each.name) != getattr(base, each.name)
        ]
        name = short_name(self.size or (str(self.config) if self.config else default_size()))
        return " ".join([name, *changed])


@dataclass(frozen=True, kw_only=True)
class OneModel(BuiltinModel):
    """Commands that take one workload."""

    workload: str | None = None
    """Your own model: package.module:factory, a function returning a trainstep.Workload."""
    steps: int = 10
    """Timed steps per measurement; ratios have intervals from 7 up."""

    def source(self) -> WorkloadSource:
        """The workload these flags name."""
        from trainstep.workload import builtin_source, factory_source

        if self.workload is not None:
            if self.size is not None or self.data is not None:
                raise UsageError("--workload brings its own model and data; leave out --size and --data")
            if changed := _changed(self.model, preset(None, self.config)[0]):
                raise UsageError(f"--workload brings its own model; leave out --{changed[0].replace('_', '-')}")
            return factory_source(self.workload)
        return builtin_source(self.model_name(), self.model.checked(), self.data)

    def require_nothing_to_run(self, flag: str) -> None:
        """Raise `UsageError` if flags say what to measure beside `flag`, which reads a file instead."""
        given = [name for name in ("size", "config", "workload", "data") if getattr(self, name) is not None]
        if not given:
            model, step = preset(None, None)
            given = _changed(self.model, model) + _changed(self.step, step)
        if given:
            raise UsageError(
                f"{flag} reads a file and measures nothing, so --{given[0].replace('_', '-')} has nothing to change; "
                "leave it out"
            )


def preset(size: str | None, config: Path | None) -> tuple[ModelConfig, StepConfig]:
    """The model and the step that `--size` and `--config` name, before other flags change them."""
    loaded = load_toml(config) if config is not None else None
    if size is not None or loaded is None:
        model = resolve_size(size or default_size())
    else:
        model = loaded.model
    return model, loaded.step if loaded is not None else StepConfig()


def default_size() -> str:
    import torch

    return "small" if torch.cuda.is_available() else "tiny"


def short_name(size: str) -> str:
    return Path(size).stem if size.endswith(".toml") else size


def _changed(flags: object, base: object) -> list[str]:
    """Names of the fields whose value, or only value where there may be several, is not the base's."""
    return [name for name, value in vars(base).items() if getattr(flags, name) not in (value, (value,))]
