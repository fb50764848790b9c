"""Flags of commands: made from configurations, and those that several commands share."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import shlex
import sys
import textwrap
import typing
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, OmitArgPrefixes, arg
from tyro.constructors import PrimitiveConstructorSpec

from trainstep.base.config import SHAPE, SIZES, ModelConfig, StepConfig, check_value, load_toml, resolve_size
from trainstep.base.errors import UsageError
from trainstep.base.guards import launch_folder
from trainstep.observe.command import script_at

if TYPE_CHECKING:
    from trainstep.base.precision import PrecisionName
    from trainstep.commands.output import How
    from trainstep.step.workload import WorkloadSource

READS = "--from reads a file and measures nothing, so {flag} has nothing to change; leave it out"
"""Refuses a flag beside --from."""
DESCRIPTION = "Shows where a Transformer training step spends its time and memory, makes it faster, and proves it."


def parse_as(commands: Any, words: Sequence[str]) -> Common:
    """The words as an instance of one of the commands' classes, given as their union.

    Raises SystemExit after --help, which was printed; UsageError for other words that name no command and its flags.
    """
    options: Any = {"prog": "trainstep", "description": DESCRIPTION, "config": (OmitArgPrefixes, DisallowNone)}
    _refuse_gone(words)
    given, told, printed = list(words), io.StringIO(), Help(sys.stdout)
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(printed):
            parsed, unknown = tyro.cli(commands, args=given, return_unknown_args=True, **options)
    except SystemExit as error:
        if error.code:
            raise UsageError(_mistake(given, (), told.getvalue())) from None
        sys.stdout.write(printed.text)  # its colours are no text of anybody's
        raise
    command: Common = getattr(parsed, "experiment", parsed)
    if unknown:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(told):
            tyro.cli(type(command), args=["--help"], **options)
        raise UsageError(_mistake(given, unknown, told.getvalue()))
    return command


def _mistake(words: Sequence[str], unknown: Sequence[str], told: str) -> str:
    """A mistake in one line, with the words to type where they are known.

    Args:
        words: all of them.
        unknown: those that the parser does not take; without any, the mistake is another.
        told: the parser's own words for that, else the command's help.
    """
    named = list(itertools.takewhile(str.isalpha, words))[: 2 if words[:1] == ["bench"] else 1]
    command, commands = shlex.join(["trainstep", *named]), re.search("Expected one of {([^}]*)}", told)
    of_script = unknown or (words if commands else ())
    if (at := script_at(of_script)) is not None:
        begin = words.index(of_script[at])
        flags = OF_SCRIPTS.get(named[-1], []) if named else words[:begin]
        return f"only trainstep run takes a script; type {shlex.join(['trainstep', 'run', *flags, *words[begin:]])}"
    if unknown:
        known, others = re.findall(r"--[\w-]+", told), f"{command} --help"
        key = next((each for each in unknown if each.startswith("-")), unknown[0]).partition("=")[0]
        what = f"{key} stands in front of the command's name" if key in known else f"unknown {key}"
    elif commands:
        known, key, what = re.findall(r"\w+", commands[1]), command.rpartition(" ")[2], f"{command} names no command"
        others = ", ".join(known)
    else:  # the first paragraph below the title of a box, between rules or empty lines
        lines = (line.strip(" │|╰╯") for line in re.sub(r"\x1b\[[\d;]*m", "", told).splitlines()[1:])
        parts = itertools.groupby(lines, lambda line: bool(line.strip("─-")))
        return f"{next(' '.join(part) for is_text, part in parts if is_text).rstrip('.')}; see {command} --help"
    close = set(difflib.get_close_matches(key, known, 1, cutoff=0.75)) - {key}
    return f"{what}{''.join(f'; did you mean {each}?' for each in close)} ({others})"


OF_SCRIPTS = {"ladder": ["--ladder"], "memory": ["--deep"], "profile": ["--deep"], "dtypes": ["--deep"]}
"""Command that takes no script → flags of `run` that show of a script what it shows."""


GONE = {
    "accumulation": "python -m examples.accumulation adds 0.01 a thousand times",
    "cwd-copy": "a ladder works in a copy of the folder; --in-place asks for the folder itself",
    "emit": "docs/train.md has the files for Slurm, SkyPilot and Kubeflow, in which torchrun starts the run",
    "executor": "a sweep runs where it is started; on Slurm give its command to sbatch (docs/sweep.md)",
    "memory --checkpointing": "bench step --checkpointing none,every-1,selective times policies, memory --fit chooses",
    "feed-forward": "python -m examples.feed_forward --layer B D F C W has it (docs/theory.md)",
    "gathers": "bench parallel has the waits for gathers in exposed communication, and --trace draws them",
    "jobs": "a sweep runs one case at a time, as benchmarks disturb one another; start a sweep on each GPU",
    "measure": "analyze measures rates for --calibration, and bench step a whole step",
    "nsys": "profile --nvtx runs under nsys profile, and --from reads its export (docs/profile.md)",
    "page-every": "train draws the page at its end; trainstep report draws that of a run under way",
    "rungs": "--changes has its place",
    "samples": "train writes no text",
}
"""Flags that no command, or one, has any more → what to do instead."""


def _refuse_gone(words: Sequence[str]) -> None:
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and (why := GONE.get(name) or GONE.get(f"{words[0]} --{name}")):
            raise UsageError(f"--{name} is gone: {why}")


EMPTY_DEFAULT = re.compile(r"\(default:((?:[\s│]|\x1b\[[\d;]*m)+)(?:None|True|False)\)")
"""A default that says nothing, which may go on in the next line of its box."""


class Help(io.StringIO):
    """The parser's help, which knows whether a terminal will show it."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def isatty(self) -> bool:
        """True if that is a terminal."""
        return bool(self._stream.isatty())

    @property
    def text(self) -> str:
        """All of it, without defaults that say nothing."""
        whole, colour = self.getvalue(), r"\x1b\[[\d;]*m"
        visible = re.compile(rf"({colour})|[^\s│]")
        blank = EMPTY_DEFAULT.sub(lambda found: visible.sub(lambda each: each[1] or " ", found[0]), whole)
        pairs = zip(whole.split("\n"), blank.split("\n"), strict=True)
        return "\n".join(new for old, new in pairs if new == old or re.sub(colour, "", new).strip(" │\r"))


def commas(item: Any) -> Any:
    """The type of a flag that takes several values with commas between them: a tuple of `item`."""
    choices = typing.get_args(item) if typing.get_origin(item) is Literal else ()
    one = "|".join(choices) if choices else item.__name__.upper()

    def parse(words: list[str]) -> tuple[Any, ...]:
        values = tuple((str if choices else item)(word) for word in words[0].split(","))
        for value in values:
            check_value(item, value, where="a value")
        return values

    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{one}[,…]",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: [shown(values)],
    )
    return Annotated[tuple[item, ...], spec]


def optional_text(metavar: str) -> Any:
    """The type of a flag that may have a value: None without the flag, empty without a value."""

    def parse(words: list[str]) -> str:
        if len(words) > 1:
            raise ValueError(f"expected one {metavar}, or none")
        return words[0] if words else ""

    spec = PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{metavar}]",
        instance_from_str=parse,
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: [] if value is None else [value],
    )
    return Annotated[str | None, spec]


def shown(value: object) -> str:
    """A default as the help shows it and the command line takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            docs[statement.target.id] = " ".join(str(text).split())
    return docs


def flags_of(
    config: type, *, several: bool = False, defaults: Mapping[str, object] | None = None, without: Sequence[str] = ()
) -> Any:
    """Flags with the names, types and docstrings of a configuration's fields, except those in `without`.

    They parse to a dictionary of those that were given; the command that takes them knows what the others are. With
    `several` each takes values with commas: the axes of a grid. `defaults` is what the help says of flags whose default
    is not the field's.
    """
    types, docs = typing.get_type_hints(config), field_docs(config)
    values = {each.name: each.default for each in dataclasses.fields(config)} | dict(defaults or {})
    flags = {
        name: Annotated[
            commas(types[name]) if several else types[name],
            arg(help=docs[name], help_behavior_hint=f"(default: {shown(value)})"),
        ]
        for name, value in values.items()
        if name not in without
    }
    typed_dict: Any = typing.TypedDict  # mypy takes only fields written out
    made = typed_dict(f"{config.__name__}Flags", flags, total=False)
    made.__doc__ = config.__doc__
    return made


def axes_of(given: Mapping[str, Any], default: object) -> dict[str, Any]:
    """The values of every axis of a grid: those given, or the one that the field has in `default`."""
    return {name: given.get(name, (value,)) for name, value in vars(default).items()}


VARIED = [name for name in vars(ModelConfig()) if len({vars(size)[name] for size in SIZES.values()}) > 1]
ModelFlags: Any = flags_of(ModelConfig, defaults=dict.fromkeys(VARIED, "the size's"))
StepFlags: Any = flags_of(StepConfig)
StepGrid: Any = flags_of(StepConfig, several=True)


@dataclass(frozen=True, kw_only=True)
class Common(ABC):
    """Flags that every command takes."""

    verbose: Annotated[FlagCreatePairsOff[bool], arg(aliases=["-v"])] = False
    """Print tables and all findings below the answer."""
    json: FlagCreatePairsOff[bool] = False
    """Print the summary as one line of JSON on standard output, in place of the answer."""
    quiet: FlagCreatePairsOff[bool] = False
    """Print errors alone. Files are written as ever."""
    has_summary = True  # of a launch, for --json; no field
    debug: FlagCreatePairsOff[bool] = False
    """Show the traceback of an error, and of every case that fails."""

    @property
    def how(self) -> How:
        """Output that the flags ask for.

        Raises:
            UsageError: two of them, or the summary of a command that makes none.
        """
        ways: tuple[How, ...] = ("verbose", "json", "quiet")
        asked = [way for way in ways if getattr(self, way)]
        if len(asked) > 1:
            raise UsageError(f"--{asked[0]} and --{asked[1]} are two ways to print one result; give one of them")
        if self.json and not self.has_summary:
            raise UsageError(f"{type(self).__name__.lower()} makes no summary for --json; leave it out")
        return asked[0] if asked else ""

    def given(self) -> dict[str, Any]:
        """The flags whose values differ from their defaults, and all given flags of a configuration; by field."""
        found: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            found |= value if isinstance(value, dict) else {each.name: value} if value != each.default else {}
        return found

    def refuse(self, why: str, *names: str, but: Collection[str] = ()) -> None:
        """Raise `UsageError` if one of the flags `names` is given, which the command would ignore.

        Args:
            why: the error, with `{flag}` in the flag's place. It says what to do.
            names: fields. Without names, every field outside of `but` is refused.
            but: fields that the command obeys.
        """
        refused = names or self.given().keys() - {*but, "debug", "verbose", "json", "quiet"}
        for name, value in self.given().items():
            if name in refused:
                raise UsageError(why.format(flag=_words(name, value)[0]))

    @contextlib.contextmanager
    def in_folder(self, name: str = "", *, launch: str = "", rank: int = 0) -> Iterator[Self]:
        """This command with an --out that no other launch uses meanwhile.

        Where --out is the default, each launch gets a new folder in it, whose name has a number and `name`. The ranks
        of one launch share it.
        """
        out, default = vars(self)["out"], getattr(type(self), "out")  # noqa: B009
        who = f"trainstep {default.name.replace('-', ' ', 1)}"
        with launch_folder(out, who, name if out == default else None, launch=launch, rank=rank) as folder:
            changed: dict[str, Any] = {"out": folder}
            yield dataclasses.replace(self, **changed)

    @abstractmethod
    def run(self) -> int:
        """Do what the flags say, print it and write it; returns the exit code."""


@dataclass(frozen=True, kw_only=True)
class BuiltinModel(Common):
    """Commands that take one of our models."""

    size: str | None = None
    """Named size (tiny, small, medium, large, 2.7B, 8B, 10B, and each model of CS336's handouts with its year, such as
    2025/xl or 2026/xl) or a .toml file with a [model] table; by default tiny, or small where there is a GPU. The
    model's own flags change it further."""
    config: Path | None = None
    """TOML file with [model] and [step] tables (train reads [train] too), as defaults for the flags."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    model: ModelFlags = field(default_factory=dict)
    step: StepFlags = field(default_factory=dict)

    def preset(self) -> tuple[ModelConfig, StepConfig]:
        """The model and the step that `--size` and `--config` name, before other flags change them."""
        return preset(self.size, self.config)

    def model_config(self) -> ModelConfig:
        return dataclasses.replace(self.preset()[0], **self.model)

    def step_config(self) -> StepConfig:
        return dataclasses.replace(self.preset()[1], **self.step)

    def model_name(self) -> str:
        """The size's name, with what other flags changed of it."""
        named = vars(self.preset()[0]).items()
        changed = [f"{name}={self.model[name]}" for name, value in named if self.model.get(name, value) != value]
        return " ".join([short_name(self.size or self.config or default_size()), *changed])


@dataclass(frozen=True, kw_only=True)
class AnyModel(BuiltinModel):
    """Commands that take one of our models, or a user's."""

    workload: str | None = None
    """Your own model: package.module:factory, a function returning a trainstep.Workload."""

    def source(self) -> WorkloadSource:
        """The workload these flags name."""
        from trainstep.step.workload import builtin_source

        if self.workload is None:
            return builtin_source(self.model_name(), self.model_config(), self.data)
        return sources([self.size] if self.size else [], self.workload, self.data, list(self.model))[0]

    def own_step(self, source: WorkloadSource) -> StepConfig:
        """The step these flags ask for; a precision that nothing names is the workload's own."""
        config = self.step_config()
        if "precision" in self.step or config.precision != StepConfig().precision:
            return config
        return dataclasses.replace(config, precision=source.own_precision)


@dataclass(frozen=True, kw_only=True)
class OneModel(AnyModel):
    """Commands that measure one workload."""

    steps: int = 10
    """Timed steps per measurement; ratios have intervals from 7 up."""


@dataclass(frozen=True, kw_only=True)
class Climbed(AnyModel):
    """Commands that climb the ladder."""

    changes: str | None = None
    """Changes that the ladder tries, by name and divided by commas, as in "bf16 autocast,compiled blocks"; by default
    all that may help."""


def sources(
    sizes: Sequence[str], workload: str | None, data: Path | None, model: Sequence[str] = ()
) -> list[WorkloadSource]:
    """Our models of these sizes, by default the tiny one, or the user's own workload.

    A size, data or flags (`model`) of a model beside a workload, which brings its own, are a `UsageError`.
    """
    from trainstep.step.workload import builtin_source, factory_source

    if workload is None:
        models = [(short_name(size), resolve_size(size)) for size in sizes or ("tiny",)]
        return [builtin_source(name, model, data) for name, model in models]
    if sizes or data is not None:
        raise UsageError("--workload brings its own model and data; leave out --size and --data")
    if model:
        raise UsageError(f"--workload brings its own model; leave out --{model[0].replace('_', '-')}")
    return [factory_source(workload)]


def own_precisions(
    source: WorkloadSource, given: Mapping[str, Any], usual: Sequence[PrecisionName] = (StepConfig().precision,)
) -> dict[str, Any]:
    """The axis of precisions where none is given: the usual ones, or that of weights that come in bf16."""
    if "precision" in given:
        return {}
    own = source.own_precision
    return {"precision": usual if own == StepConfig().precision else (own,)}


def preset(
    size: str | None, config: Path | None, default: str | None = None, step: StepConfig | None = None
) -> tuple[ModelConfig, StepConfig]:
    """The model and the step that `--size` and `--config` name; without them the default size and `step`."""
    if config is None:
        return resolve_size(size or default or default_size()), step or StepConfig()
    loaded = load_toml(config)
    return loaded.model if size is None else resolve_size(size), loaded.step


def default_size() -> str:
    """The size of a model that nothing names."""
    import torch

    return "small" if torch.cuda.is_available() else "tiny"


def short_name(size: str | Path) -> str:
    """Name of a size, or of a file that describes one, in tables; the name of a file's model has its shape."""
    if not str(size).endswith(".toml"):
        return str(size)
    model = vars(resolve_size(str(size)))
    return " ".join([Path(size).stem, *(f"{name}={model[name]}" for name in SHAPE)])


def words_of(command: Common, without: Sequence[str] = ()) -> list[str]:
    """The flags that make this command again, without those of the fields `without`."""
    given = command.given().items()
    return [word for name, value in given if name not in without for word in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    """A field's flag, with its value."""
    flag = name.replace("_", "-")
    return [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", shown(value)]
