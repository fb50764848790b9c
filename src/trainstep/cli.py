"""The command line: one dataclass per command. Each parses, calls, prints; what is done is done elsewhere.

Torch is imported by the functions that need it, so `--help` answers at once.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg, subcommand
from tyro.constructors import PrimitiveConstructorSpec

from trainstep.config import ModelConfig, StepConfig, StepMode, check_value, load_toml, resolve_size
from trainstep.errors import UsageError

if TYPE_CHECKING:
    import rich.console

    from trainstep.report.records import Record
    from trainstep.workload import WorkloadSource

DESCRIPTION = "Shows where a Transformer training step spends its time and memory, makes it faster, and proves it."
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def commas(item: Any) -> Any:
    """The type of a flag that takes several values with commas between them: a tuple of `item`."""
    choices = typing.get_args(item) if typing.get_origin(item) is Literal else ()
    one = "|".join(choices) if choices else item.__name__.upper()

    def parse(words: list[str]) -> tuple[Any, ...]:
        values = tuple((str if choices else item)(word) for word in words[0].split(","))
        for value in values:
            check_value(item, value, where="a value")
        return values

    return Annotated[
        tuple[item, ...],
        PrimitiveConstructorSpec(
            nargs=1,
            metavar=f"{one}[,…]",
            instance_from_str=parse,
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda values: [",".join(map(str, values))],
        ),
    ]


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            docs[statement.target.id] = " ".join(str(text).split())
    return docs


def grid_of(cls: type) -> type:
    """A dataclass with the fields, defaults and docs of `cls`, each taking several values: the axes of a grid."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    fields = [
        (each.name, Annotated[commas(hints[each.name]), arg(help=docs[each.name])], field(default=(each.default,)))
        for each in dataclasses.fields(cls)
    ]
    return dataclasses.make_dataclass(f"{cls.__name__}Grid", fields, frozen=True)


StepGrid: Any = grid_of(StepConfig)


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
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class OneModel(Common):
    """Commands that take one workload."""

    size: str | None = None
    """Named size (tiny, small, medium, large, xl, 2.7B, 10B) or a .toml file with a [model] table; by default tiny, or
    small where there is a GPU. The model's own flags change it further."""
    config: Path | None = None
    """TOML file with [model] and [step] tables, as defaults for the flags."""
    workload: str | None = None
    """Your own model: package.module:factory, a function returning a trainstep.Workload."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    model: ModelFlags = field(default_factory=ModelFlags)
    step: StepFlags = field(default_factory=StepFlags)
    steps: int = 10
    """Timed steps per measurement; ratios have intervals from 7 up."""

    def source(self) -> WorkloadSource:
        """The workload these flags name."""
        from trainstep.workload import builtin_source, factory_source

        if self.workload is not None:
            if self.size is not None or self.data is not None:
                raise UsageError("--workload brings its own model and data; leave out --size and --data")
            return factory_source(self.workload)
        base, _ = _preset(self.size, self.config)
        changed = [
            f"{each.name}={getattr(self.model, each.name)}"
            for each in dataclasses.fields(ModelConfig)
            if getattr(self.model, each.name) != getattr(base, each.name)
        ]
        name = _short_name(self.size or (str(self.config) if self.config else _default_size()))
        return builtin_source(" ".join([name, *changed]), self.model.checked(), self.data)


@dataclass(frozen=True, kw_only=True)
class Analyze(OneModel):
    """Measure a training step, explain it, make it faster rung by rung, and write the report."""

    out: Path = Path("results/analyze")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        """Measure, print and write."""
        from trainstep.analysis import analysis_records

        source = self.source()
        return _measure(
            analysis_records(source, self.step.checked(), steps=self.steps), self.out, f"analyze {source.name}"
        )


@dataclass(frozen=True, kw_only=True)
class BenchLadder(OneModel):
    """Climb the ladder alone: from the plain step upwards, one checked change per rung."""

    warmup: int = 3
    """Steps before the timed ones."""
    out: Path = Path("results/bench-ladder")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        """Measure, print and write."""
        from trainstep.bench.ladder import climb

        source = self.source()
        records = climb(source, self.step.checked(), warmup=self.warmup, steps=self.steps)
        return _measure(records, self.out, f"ladder of {source.name}")


@dataclass(frozen=True, kw_only=True)
class BenchStep(Common):
    """Time forward, loss, backward and optimizer over a grid: every flag with commas is an axis."""

    size: commas(str) = ("tiny",)  # type: ignore[valid-type]
    """Named sizes (tiny, small, medium, large, xl, 2.7B, 10B) or .toml files with a [model] table."""
    workload: str | None = None
    """Your own model instead: package.module:factory, a function returning a trainstep.Workload."""
    data: Path | None = None
    """Text file, folder of text, or .bin of token ids; by default the Python standard library's source."""
    grid: StepGrid = field(default_factory=StepGrid)
    """How the steps are taken; every combination of the values is a case."""
    mode: commas(StepMode) = ("step",)  # type: ignore[valid-type]
    """forward (without gradients), forward-backward, or the whole step with the optimizer."""
    warmup: commas(int) = (5,)  # type: ignore[valid-type]
    """Steps before the timed ones. Several values share one run, each row being its window."""
    steps: int = 10
    """Timed steps per case."""
    repeat: int = 1
    """Passes over the whole grid; from 2 on, the passes are compared with each other."""
    out: Path = Path("results/bench-step")
    """Folder for results.jsonl, tables/ and report.html."""

    def run(self) -> int:
        """Measure, print and write."""
        from trainstep.bench.step import grid_cases, run_cases
        from trainstep.workload import builtin_source, factory_source

        if self.workload is None:
            models = [(name, resolve_size(name)) for name in self.size]
            sources = [builtin_source(_short_name(name), model, self.data) for name, model in models]
        else:
            sources = [factory_source(self.workload)]
        axes = {each.name: getattr(self.grid, each.name) for each in dataclasses.fields(StepGrid)}
        cases = grid_cases(sources, axes, modes=self.mode, warmups=self.warmup, steps=self.steps, repeat=self.repeat)
        return _measure(run_cases(cases), self.out, "bench step", total=len(cases))


@dataclass(frozen=True, kw_only=True)
class Compare(Common):
    """Compare two result files: a ratio with its interval per matching row, and a verdict where it is due."""

    old: Positional[Path]
    """results.jsonl of the run before."""
    new: Positional[Path]
    """results.jsonl of the run after."""
    spread: float = 0.02
    """Relative difference between runs of one program on one machine; every interval is widened by it."""

    def run(self) -> int:
        """Read, compare and print."""
        from trainstep.report.compare import compare, comparison_table
        from trainstep.report.records import read_records
        from trainstep.report.tables import to_terminal

        comparisons = compare(read_records(self.old), read_records(self.new), self.spread)
        _console().print(to_terminal(comparison_table(comparisons, f"{self.old} → {self.new}")))
        return 0


@dataclass(frozen=True, kw_only=True)
class Info(Common):
    """Print the environment, for bug reports."""

    def run(self) -> int:
        """Print one line per fact."""
        from trainstep.measure.environment import describe, gpu_state
        from trainstep.workload import resolve_device

        device = resolve_device("auto")
        for name, value in {**describe(device), **gpu_state(device)}.items():
            print(f"{name:18} {value}")
        return 0


def _preset(size: str | None, config: Path | None) -> tuple[ModelConfig, StepConfig]:
    """The model and the step that `--size` and `--config` name, before other flags change them."""
    loaded = load_toml(config) if config is not None else None
    if size is not None or loaded is None:
        model = resolve_size(size or _default_size())
    else:
        model = loaded.model
    return model, loaded.step if loaded is not None else StepConfig()


def _default_size() -> str:
    import torch

    return "small" if torch.cuda.is_available() else "tiny"


def _short_name(size: str) -> str:
    return Path(size).stem if size.endswith(".toml") else size


@dataclass(frozen=True)
class _Choice:
    """The flags that choose the defaults of others."""

    size: str | None = None
    config: Path | None = None
    help: bool = False


def _parse(arguments: Sequence[str]) -> Any:
    """The command that the arguments name, as one of the dataclasses above."""
    one_model: dict[str, Any] = {}
    if set(arguments[:2]) & {"analyze", "ladder"} and not {"-h", "--help"} & set(arguments):
        choice, _ = tyro.cli(_Choice, args=arguments, return_unknown_args=True, add_help=False)
        model, step = _preset(choice.size, choice.config)
        one_model = {"model": ModelFlags(**vars(model)), "step": StepFlags(**vars(step))}
    experiments: Any = Union[  # noqa: UP007 - for a type checker `|` joins values here, not types
        Annotated[BenchStep, subcommand("step")],
        Annotated[BenchLadder, subcommand("ladder", default=BenchLadder(**one_model))],
    ]
    bench: Any = dataclasses.make_dataclass("Bench", [("experiment", experiments)])
    bench.__doc__ = "Run an experiment over a grid of cases."
    commands: Any = Union[  # noqa: UP007
        Annotated[Analyze, subcommand("analyze", default=Analyze(**one_model))],
        Annotated[bench, subcommand("bench")],
        Annotated[Compare, subcommand("compare")],
        Annotated[Info, subcommand("info")],
    ]
    command = tyro.cli(commands, args=arguments, prog="trainstep", description=DESCRIPTION, config=(OmitArgPrefixes,))
    return getattr(command, "experiment", command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 2 the input was bad, 130 interrupted (what was measured is on disk)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_parse(words).run())
    except UsageError as error:
        if "--debug" in words:
            raise
        print(f"trainstep: {error}", file=sys.stderr)
        sys.exit(2)


def _measure(records: Iterable[Record], out: Path, title: str, total: int | None = None) -> int:
    """Write each record as it comes, with progress; then print the tables and findings and write the report."""
    from trainstep.report.compare import comparison_table, repeatability
    from trainstep.report.records import RecordWriter
    from trainstep.report.report import Report
    from trainstep.report.tables import make_tables, to_terminal

    console = _console()
    writer = RecordWriter(out / "results.jsonl")
    console.print(f"trainstep {title} → {out}", markup=False, highlight=False)
    taken: list[Record] = []
    code = 0
    try:
        for record in _with_progress(records, console, title, total):
            writer.write(record)
            taken.append(record)
    except KeyboardInterrupt:
        console.print(f"[bold]Stopped.[/bold] {len(taken)} rows measured so far are kept.")
        code = INTERRUPTED
    finally:
        writer.close()
    report = Report(taken)
    tables = make_tables(taken, brief=True)
    if passes := repeatability(taken):
        tables.append(comparison_table(passes, "Later passes against the first: the interval should contain 1"))
    for table in tables:
        console.print(to_terminal(table))
    for finding in report.findings:
        console.print(f"• {finding.sentence}", markup=False, highlight=False)
    if report.recommended_flags:
        console.print(f"\nRecommended: {report.recommended_flags}", markup=False, highlight=False)
    if taken:
        report.write(out)
        console.print(f"\nWritten to {out}: results.jsonl, report.html, tables/", markup=False, highlight=False)
    return code


def _with_progress(
    records: Iterable[Record], console: rich.console.Console, title: str, total: int | None
) -> Iterator[Record]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        for record in records:
            what = " ".join(str(value) for value in record.case.values() if value is not None)
            progress.update(task, advance=1, description=f"{title}: {what[:60]}")
            yield record


def _console() -> rich.console.Console:
    import rich.console

    width = None if sys.stdout.isatty() else 160
    return rich.console.Console(width=width)


if __name__ == "__main__":
    main()
