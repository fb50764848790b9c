"""The command as its users meet it: help, errors, files."""

import json
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.check.step import StepCheck
from trainstep.commands.cli import main
from trainstep.commands.options import StepGrid, field_docs
from trainstep.commands.output import console_for_output
from trainstep.rows import ChangeRow, MemoryTimelineRow, PeakRow, ProfileRow, StepRow
from trainstep.rows.records import of_kind, read_records, write_whole

REPOSITORY = Path(__file__).parents[2]
QUICK = ["--num-layers", "1", "--d-model", "32", "--d-ff", "64", "--num-heads", "2", "--vocab-size", "256",
         "--context", "32", "--batch", "2", "--device", "cpu"]  # fmt: skip


def trainstep(*words, cwd=REPOSITORY):
    return subprocess.run([sys.executable, "-m", "trainstep", *words], capture_output=True, text=True, cwd=cwd)


COMMANDS = (
    "|analyze|bench|bench step|bench ladder|bench attention|bench collectives|bench parallel|compare|dtypes|memory"
)
COMMANDS += "|plan|profile|report|run|sweep|train|tune|info"


def cpu_seconds(code):
    """Processor time of a fresh interpreter, which other processes change little, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found


@pytest.fixture(scope="module")
def seconds_of_torch():
    return min(cpu_seconds("import torch")[0] for _ in range(2))


@pytest.mark.parametrize("command", COMMANDS.split("|"))
def test_help_needs_no_torch_and_little_time(command, seconds_of_torch):
    """The bar is 0.5 s; importing torch takes at least twice that, on slower machines too."""
    words = [*command.split(), "--help"]
    code = f"import sys; from trainstep.commands.cli import main\ntry: main({words!r})\nfinally: print(*sys.modules)"
    runs = (cpu_seconds(code) for _ in range(3))  # other processes lengthen some of them
    found = next((found for seconds, found in runs if seconds < 0.5 * seconds_of_torch), None)
    assert getattr(found, "returncode", "too slow") == 0
    assert "usage: trainstep" in found.stdout
    modules = set(found.stdout.splitlines()[-1].split())
    assert not modules & {"torch", "triton", "pandas", "numpy"}


@pytest.mark.parametrize("module", ["trainstep", "trainstep.commands.cli"])
def test_both_modules_are_the_command(module):
    found = subprocess.run([sys.executable, "-m", module, "analyze", "--help"], capture_output=True, text=True)
    assert found.returncode == 0
    assert found.stdout.startswith("usage: trainstep analyze")
    wrong = subprocess.run([sys.executable, "-m", module, "plan", "--size", "huge"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("trainstep: unknown size 'huge'")


def test_every_flag_of_a_step_is_documented_once(capsys):
    docs = field_docs(StepConfig)
    assert set(docs) == set(StepGrid.__annotations__) == set(StepConfig.__dataclass_fields__)
    assert all(len(text) > 10 for text in docs.values())
    assert main_code(["bench", "step", "--help"]) == 0
    text = " ".join(re.sub(r"[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    for name, doc in docs.items():
        assert f"--{name.replace('_', '-')}" in text
        assert doc[:40] in text
        assert f"{doc} (default: {getattr(StepConfig(), name)})" in text


def test_a_quick_analysis_compiles_and_checks_nothing(tmp_path, monkeypatch, capsys):
    """Facts, phases, memory and kernels, each announced; what takes long is left out."""
    for owner, name in ((torch.nn.Module, "compile"), (StepCheck, "__init__")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("left out by --quick"))
    words = ["--workload", "examples.own_model:workload", "--device", "cpu", "--precision", "bf16"]
    with pytest.raises(SystemExit) as stop:
        main(["analyze", *words, "--quick", "--out", str(tmp_path)])
    assert stop.value.code == 0
    rows = read_records(tmp_path / "results.jsonl")
    kinds = Counter(row.kind for row in rows)
    assert kinds["workload"] == kinds["memory-timeline"] == kinds["profile"] == 1
    assert kinds["step"] == 2
    assert kinds["kernel"] > 5
    assert not kinds["change"] + kinds["control"]
    assert {len(row.samples["step"]) for row in rows if row.kind == "step"} == {6}
    said = capsys.readouterr().err
    parts = [line.split(" s  ")[1] for line in said.splitlines() if re.match(r" *\d+ s  ", line)]
    assert [part.partition(":")[0] for part in parts] == [
        "facts",
        "phases of the step and its warm-up",
        "memory",
        "what the device reaches",
        "kernels",
    ]


def test_analyze_end_to_end(tmp_path, capfd):
    assert main_code(["analyze", *QUICK, "-v", "--steps", "7", "--out", str(tmp_path / "out")]) == 0
    said = capfd.readouterr()
    assert "profiler_start" not in said.err
    records = read_records(tmp_path / "out" / "results.jsonl")
    assert [record.case["warmup"] for record in of_kind(records, StepRow)] == [0, 1, 2, 5]
    rungs = of_kind(records, ChangeRow)
    assert rungs[0].change == "baseline"
    assert {"fused attention", "fused optimizer"} <= {rung.change for rung in rungs[1:]}, "by the phases of this step"
    assert {rung.status for rung in rungs} <= {"ok", "unsupported"}
    kinds = [record.kind for record in records]
    last_timed = max(n for n, kind in enumerate(kinds) if kind in ("step", "change"))
    assert kinds.index("profile") > last_timed, "a profiler leaves a GPU's process slower than it was"
    losses = rungs[0].samples["training_loss"]
    assert losses[-1] < losses[0], "it trains on real text, so the loss falls"
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"results.jsonl", "report.html", "step.md", "ladder.tex", "ladder.typ", "ceiling.csv"} <= names
    assert "dominates" in said.out
    assert "num_layers=1" in records[0].case["workload"], "a changed size must not carry the size's name alone"


@pytest.mark.thorough
def test_bench_step_with_commas_and_repeats(tmp_path):
    config = tmp_path / "toy.toml"
    config.write_text("[model]\nnum_layers = 1\nd_model = 32\nd_ff = 64\nnum_heads = 2\n")
    words = ["--size", str(config), "--precision", "fp32,tf32", "--context", "16,32", "--warmup", "1,2"]
    found = trainstep("bench", "step", *words, "--device", "cpu", "--steps", "7", "--repeat", "2", "--batch", "2",
                      "-v", "--out", str(tmp_path))  # fmt: skip
    assert found.returncode == 0, found.stderr
    records = read_records(tmp_path / "results.jsonl")
    assert len(records) == 2 * 2 * 2 * 2
    assert {record.status for record in records if record.case["precision"] == "tf32"} == {"unsupported"}
    assert {record.status for record in records if record.case["precision"] == "fp32"} == {"ok"}
    assert {record.case["workload"] for record in records} == {"toy d_model=32 d_ff=64 num_layers=1 num_heads=2"}
    assert ("the interval should contain 1" in found.stdout, "-v" in found.stdout) == (True, False), "all is there"


@pytest.mark.thorough
def test_bench_attention_with_a_named_grid_narrowed(tmp_path):
    words = ["--grid", "naive", "--seq", "32,64", "--head-dim", "16", "--impl", "eager,sdpa,flash-triton"]
    found = trainstep("bench", "attention", *words, "--device", "cpu", "--passes", "7", "--out", str(tmp_path))
    assert found.returncode == 0, found.stderr
    records = read_records(tmp_path / "results.jsonl")
    assert len(records) == 6
    assert {(record.case["batch"], record.case["heads"]) for record in records} == {(8, 0)}
    assert [record.status for record in records].count("unsupported") == 2


@pytest.mark.thorough
def test_when_no_case_could_run_the_exit_code_says_so(tmp_path, capsys):
    words = ["bench", "step", "--precision", "tf32", "--compile", "off,blocks", "--context", "16", "--device", "cpu"]
    assert main_code([*words, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "Nothing could be measured. The first of 2 reasons:" in said
    assert "unsupported: tf32 needs an NVIDIA GPU" in said
    assert len(read_records(tmp_path / "results.jsonl")) == 2, "the rows are kept"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")
def test_tuning_needs_a_gpu(capsys):
    assert main_code(["tune", "attention", "--dry-run"]) == 2
    assert "torch finds none" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_users_module_in_the_example(tmp_path):
    found = trainstep("analyze", "--workload", "examples.own_model:workload", "--device", "cpu", "--steps", "7",
                      "--out", str(tmp_path))  # fmt: skip
    assert found.returncode == 0, found.stderr
    rungs = of_kind(read_records(tmp_path / "results.jsonl"), ChangeRow)
    assert {"baseline", "fused optimizer", "bf16 autocast"} <= {rung.case["change"] for rung in rungs}
    assert all(rung.status in ("ok", "unsupported") for rung in rungs), [rung.reason for rung in rungs]


def main_code(words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code


def test_info_names_the_versions(capsys):
    assert main_code(["info"]) == 0
    assert re.search(r"^torch +\d", capsys.readouterr().out, re.M)


def test_memory_shows_a_step_and_then_its_snapshot(tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    grid = ["--precision", "fp32,bf16", "--policies", "every-1"]
    assert main_code(["memory", *QUICK, *grid, "--peaks", "--timeline", "--mode", "step", "--out", str(out)]) == 0
    records = read_records(out / "results.jsonl")
    assert {row.case["checkpointing"] for row in records} == {"every-1"}
    assert [row.case["precision"] for row in of_kind(records, PeakRow)] == ["fp32", "bf16"]
    assert [row.values["snapshot"] for row in of_kind(records, MemoryTimelineRow)] == [
        "snapshot-1.pickle",
        "snapshot-2.pickle",
    ]
    assert main_code(["memory", "--from", str(out / "snapshot-1.pickle"), "--out", str(again)]) == 0
    ours, theirs = (of_kind(read_records(folder / "results.jsonl"), MemoryTimelineRow)[0] for folder in (out, again))
    assert ours.values["peak_gib"] == theirs.values["peak_gib"]
    assert (again / "report.html").exists()


def test_profile_shows_a_step_and_then_its_trace(tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    words = ["--warmup", "1", "--steps", "7", "--profiled-steps", "1", "--out", str(out)]
    assert main_code(["profile", *QUICK, *words]) == 0
    names = {path.name for path in out.rglob("*") if path.is_file()}
    assert {"trace.json.gz", "report.html", "kernel.csv", "family.md", "profile.tex", "attention-piece.typ"} <= names
    assert main_code(["profile", "--from", str(out / "trace.json.gz"), "--out", str(again)]) == 0
    ours, theirs = (of_kind(read_records(folder / "results.jsonl"), ProfileRow)[0] for folder in (out, again))
    assert ours.values["kernels_ms"] == theirs.values["kernels_ms"]


MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))["mistakes"]


@pytest.mark.parametrize("words", MISTAKES)
def test_bad_input_is_one_line_with_the_remedy(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("tyro._docstrings.get_field_docstring", lambda *_: None)  # half of the time
    out = [] if words.startswith(("tune", "info")) or "--out" in words else ["--out", str(tmp_path / "out")]
    assert main_code([*shlex.split(words), *out]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert error.count("\n") == 1
    assert error.startswith("trainstep: ")
    assert not [*tmp_path.rglob("*.*")]


def test_a_model_that_fits_no_memory_is_one_line(tmp_path):
    found = trainstep("train", "--vocab-size", str(10**11), "--device", "cpu", "--out", str(tmp_path))
    assert found.returncode == 2
    (line,) = [line for line in found.stderr.splitlines() if "gloo" not in line.lower()]
    assert line.startswith("trainstep: out of memory: ")
    assert line.endswith("on more processes takes less")


@pytest.mark.parametrize("fault", [KeyError("step"), ZeroDivisionError("division by zero"), TypeError("no number")])
def test_a_fault_of_a_page_s_own_is_one_line(fault, tmp_path, monkeypatch, capsys):
    def faulty(rows, path):
        raise fault

    monkeypatch.setattr("trainstep.report.page.write_html", faulty)
    write_whole(tmp_path / "results.jsonl", [StepRow(workload="m", mode="step", warmup=1)])
    assert main_code(["report", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert (error.count("\n"), "Traceback" in out + error) == (1, False)
    assert f"no page can be made of {tmp_path}: its rows do not go together ({type(fault).__name__}: " in error
    with pytest.raises(type(fault)):
        main(["report", str(tmp_path), "--debug"])


def test_debug_shows_the_traceback():
    with pytest.raises(UsageError, match="unknown size"):
        main(["analyze", "--size", "huge", "--debug"])


PRINTED = ["plan", "--size", "tiny", "--device", "H200"]


def test_a_launch_prints_its_answer_or_its_summary_or_nothing(tmp_path, capsys):
    said = {}
    for flag in ("--debug", "-v", "--json", "--quiet"):
        assert main_code([*PRINTED, flag, "--out", str(tmp_path / "out")]) == 0
        said[flag] = capsys.readouterr().out
    answer, tables, summary, nothing = said.values()
    assert len(answer.splitlines()) <= 25
    assert max(map(len, answer.splitlines())) <= 80
    assert tables.splitlines()[:9] == answer.splitlines()[:9]
    assert len(tables) > 2 * len(answer), "the answer, and tables below it"
    assert json.loads(summary)["rows"] == len(read_records(tmp_path / "out" / "results.jsonl"))
    assert nothing == ""
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["schema"] == 1


def test_the_version_is_told(capsys):
    assert main_code(["--version"]) == 0
    assert re.fullmatch(r"trainstep \d[\w.]+\n", capsys.readouterr().out)


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("", 80), ("120", 120), ("7", 40), ("wide", 80)])
def test_a_pipe_is_as_wide_as_columns_or_80(columns, width, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert console_for_output().width == width


@pytest.mark.parametrize("command", ["run", "bench step", "memory", "train"])
def test_help_has_no_default_that_says_nothing(command, capsys):
    assert main_code([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert not re.search(r"default:[\s│]*(None|True|False)", said)
    assert not re.search(r"^│ +│$", said, re.MULTILINE)
    assert "(default: " in said, "those that say something"


def test_a_flag_s_help_is_not_that_of_its_opposite(capsys):
    main_code(["run", "--help"])
    said = " ".join(re.sub(r"[│\n]", " ", capsys.readouterr().out).split())
    assert "--no-memory With --deep: leave out the allocations" in said
