"""No command accepts a flag and ignores it: in every form of the command the flag changes a result, or is an error.

A command runs here up to the functions that measure, which only note the arguments of their calls. `flags.toml` has
another value for each flag, the forms of each command, and the functions that measure. A new flag is a line there.
"""

import contextlib
import dataclasses
import functools
import io
import re
import shlex
import tomllib
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainstep import commands
from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.bench.sweep.cases import load_grid
from trainstep.bench.tracing import trace_step
from trainstep.commands.cli import COMMANDS, parse
from trainstep.plan.rows import plan_records
from trainstep.rows import StepRow, SweepRow
from trainstep.rows.records import RecordWriter, make_row
from trainstep.step.workload import factory_source

TABLE = tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))
FORMS = [(command, form) for command, forms in TABLE["forms"].items() for form in forms]
WORDS = ["run script", "sweep file", "compare old", "compare new", "report runs", "tune what"]
"""Fields that have no flag."""
AROUND = ("debug", "verbose", "json", "quiet")
"""Flags that main obeys, around every command: tests/commands/test_cli.py has their tests."""


def classes():
    """Command → its class."""
    found = {}
    for each in typing.get_args(COMMANDS):
        parts = typing.get_args(typing.get_type_hints(each, include_extras=True).get("experiment"))
        name = each.__name__.lower()
        found |= {f"{name} {how.name}": kind for kind, how in map(typing.get_args, parts)} or {name: each}
    return found


def flags_of(command):
    """The command's flags: fields of its class, and of the configurations in these."""
    found = []
    for name, hint in typing.get_type_hints(classes()[command], include_extras=True).items():
        plain, of = hint, str(getattr(hint, "__metadata__", ""))
        while hasattr(plain, "__metadata__"):
            plain = plain.__origin__
        named = re.search(r"_ArgConfig\(name='([\w-]+)'", of)
        if f"{command} {name}" not in WORDS:
            found += plain.__annotations__ if typing.is_typeddict(plain) else [named[1] if named else name]
    return [name for name in found if name not in AROUND]


def value_of(command, flag):
    return TABLE["values_of"].get(command, {}).get(flag, TABLE["values"].get(flag))


def words_for(command, flag):
    """The flag, with another value than its default."""
    value, flag = value_of(command, flag), flag.replace("_", "-")
    return [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", value]


def test_every_flag_of_every_command_is_in_the_table():
    """If this fails, a command or a flag is new: give it a line in flags.toml."""
    assert TABLE["forms"].keys() == classes().keys()
    pairs = [(command, flag) for command in classes() for flag in flags_of(command)]
    assert [pair for pair in pairs if value_of(*pair) is None] == []
    assert TABLE["values"].keys() - {flag for _, flag in pairs} == set(), "flags that no command has"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that flags name."""
    folder = tmp_path_factory.mktemp("flags")
    (folder / "run.toml").write_text('[model]\nsize = "medium"\n[step]\nbatch = 3\n')
    (folder / "sweep.toml").write_text('command = "bench step"\n[axes]\nbatch = [1, 2]\n')
    case = load_grid(folder / "sweep.toml", lambda words: words, folder / "out").cases[0]
    case.folder.mkdir(parents=True)
    case.keep([make_row(SweepRow, case.columns(), {}, status="failed", reason="to try again")])
    for name, precision, speed in (("old", "fp32", 1.0), ("new", "bf16", 2.0)):
        writer = RecordWriter(folder / f"{name}.jsonl")
        for each, times in ((precision, [speed] * 8), ("tf32", [1.2 * speed, speed] * 8)):
            case = {"workload": "w", "mode": "step", "precision": each}
            writer.write(make_row(StepRow, case, {"step_ms": times[0]}, samples={"step": times}))
        writer.close()
    return folder


@pytest.fixture(scope="module")
def traced():
    """A step of the workload, traced once for all plans of it."""
    return trace_step(factory_source("examples.own_model:workload"), StepConfig(precision="bf16", device="cpu"))


@pytest.fixture
def done(traced, monkeypatch):
    """A function that runs a command: its calls and output as text, or the error that ends it."""
    noted = []

    def note(*values):
        noted.append(re.sub(r" at 0x[0-9a-f]+", "", repr(values)))

    def noting(name, result=()):
        def call(*args, **named):
            note(name, [each for each in args if not hasattr(each, "world_size")], sorted(named.items()))
            return result() if callable(result) else result

        return call

    def replace(path, result=()):
        monkeypatch.setattr(f"trainstep.{path}", noting(path, result))

    def run_and_report(records, *args, **named):
        rows = list(records(lambda part: None) if callable(records) else records)
        note([dataclasses.replace(row, environment={}) for row in rows], args, sorted(named.items()))
        return 0

    def planned(request):
        """A plan of a traced step takes seconds."""
        note(dataclasses.replace(request, traced=list(request.traced or ())))
        return [] if request.traced else plan_records(request)

    def stop():
        raise SystemExit(0)

    group = contextlib.nullcontext(SimpleNamespace(rank=0, world_size=4, hosts=1, device="cpu"))
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("tyro._docstrings.get_field_docstring", lambda *_: None)  # half of the time
    monkeypatch.setattr("gc.collect", lambda: 0)  # after every trace, though nothing was traced
    for name in ("bench", "bench_ranks", "memory", "plan", "profile", "sweep"):
        monkeypatch.setattr(getattr(commands, name), "run_and_report", run_and_report)
    for module, names in TABLE["measuring"].items():
        for name in names.split():
            replace(f"{module}.{name}", lambda: (row for row in ()))
    for path in ("observe.supervise.run_script", "commands.climb.climb_script"):
        replace(path, 0)
    replace("observe.log.read_logs", [None])
    replace("commands.deep.DeepRun", SimpleNamespace(rows=lambda *_: [], close=lambda: None))
    replace("parallel.process.join_group", group)
    replace("parallel.process.join_group_or_alone", group)
    for name in ("on_all_ranks", "on_first_rank"):
        monkeypatch.setattr(f"trainstep.parallel.process.{name}", lambda process, call: call())
    monkeypatch.setattr("trainstep.commands.options.launch_folder", lambda out, *_, **__: contextlib.nullcontext(out))
    monkeypatch.setattr("trainstep.plan.rows.plan_records", planned)
    replace("bench.tracing.trace_step", traced)
    replace("train.loop.train", SimpleNamespace(is_finished=True))

    def run(command):
        noted.clear()
        with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.redirect_stderr(told):
            try:
                note(command.run())
            except SystemExit:  # where it would start another program
                pass
            except UsageError as error:
                return f"error: {error}"
        return "\n".join([*noted, told.getvalue()])

    return run


@functools.cache
def parsed(command, files, *words):
    """The command with these words. Its folder is among `files`, unless the words name or refuse a folder."""
    has_none = "--out" in words or "--nvtx" in words or command in ("tune", "info")
    end = TABLE["ends"].get(command, "").split()
    line = [*words, *([] if has_none else ["--out", "{tmp}/out"]), *end]
    return parse([*command.split(), *(each.format(tmp=files) for each in line)])


def with_flag(command, files, form, flag):
    """The form of the command with the flag too. Each flag is parsed once, as parsing takes half of the time."""
    plain, flagged, base = (parsed(command, files, *words) for words in ((), flag, form))
    new = {name: value for name, value in vars(flagged).items() if value != getattr(plain, name)}
    assert new, f"{' '.join(flag)} is the default; flags.toml needs another value"
    merged = {name: getattr(base, name) | value if isinstance(value, dict) else value for name, value in new.items()}
    return dataclasses.replace(base, **merged)


@pytest.mark.parametrize(("command", "form"), FORMS)
def test_no_flag_is_accepted_and_ignored(command, form, done, files):
    words = shlex.split(TABLE["forms"][command][form])
    before = done(parsed(command, files, *words))
    assert not before.startswith("error"), before
    wrong = []
    for flag in (words_for(command, name) for name in flags_of(command)):
        after = before if flag[0] in words else done(with_flag(command, files, words, flag))
        is_named = flag[0].strip("-").replace("-", "_") in after.replace("-", "_")
        if flag[0] not in words and (after == before or (after.startswith("error") and not is_named)):
            wrong.append(f"{' '.join(flag)}: {'ignored' if after == before else after}")
    assert not wrong
