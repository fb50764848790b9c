"""docs/course.md: every problem of both handouts has its entry, and the commands shown with their output run."""

import csv
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from trainstep.commands.cli import main

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "course.md").read_text(encoding="utf-8")

BOTH = """benchmarking_script nsys_profile mixed_precision_accumulation benchmarking_mixed_precision memory_profiling
    pytorch_attention torch_compile flash_forward flash_backward flash_benchmarking
    distributed_communication_single_node naive_ddp naive_ddp_benchmarking minimal_ddp_flat_benchmarking
    ddp_overlap_individual_parameters ddp_overlap_individual_parameters_benchmarking
    optimizer_state_sharding optimizer_state_sharding_accounting"""
HANDOUTS = {
    "2025": {*BOTH.split(), "ddp_overlap_bucketed", "ddp_bucketed_benchmarking", "communication_accounting"},
    "2026": {*BOTH.split(), "gradient_checkpointing", "fsdp", "fsdp_accounting", "alternate_ring_all_reduce"}
    | {"data_parallel_calcs", "fsdp_calcs", "tp_calcs", "fsdp_tp_calcs", "leaderboard"},
}
"""Edition → the names after "Problem" in its handout (2026: version 26.1.1)."""

COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
EXAMPLES = [
    (" ".join(command.partition("  # ")[0].replace("\\\n", " ").split()), output)
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for command, output in COMMAND.findall(block)
]
FIXED = ("trainstep plan ", "trainstep dtypes ", "python -m examples.")
"""Commands that print the same on every machine."""
LONG = ("--warmup 0", "--compile", "naive --seq 256 ", "--residuals", "examples.nested", "step8b", "bench parallel")
"""Parts of commands that take more than ten seconds, as those that start several processes or compile."""


def entries():
    """Problem → the text of its section; a section may answer several."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    return {name: text for text in sections for name in re.findall(r"`(\w+)`", text.partition("\n")[0])}


@pytest.mark.parametrize("year", HANDOUTS)
def test_every_problem_of_a_handout_has_its_entry(year):
    rows = {
        name: cells for name, *cells in re.findall(r"^\| \[`(\w+)`\]\(#([\w-]+)\) \| ([\d, ]+) \|", PAGE, re.MULTILINE)
    }
    assert {name for name, (_, years) in rows.items() if year in years} == HANDOUTS[year]
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name in HANDOUTS[year]:
        assert rows[name][0] in anchors, name
        assert len(entries()[name].split()) > 40, f"{name} has no answer"
    assert entries().keys() == HANDOUTS["2025"] | HANDOUTS["2026"]


def parts(output):
    """The tables of an output on the page, each as its titles and rows by title; and its lines outside of tables."""
    tables, others, lines = [], [], output.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        cells = re.split(r"\s{2,}", line.strip())
        if set(following.strip()) == {"─"}:
            tables.append((cells, []))
        elif tables and len(cells) == len(tables[-1][0]):
            tables[-1][1].append(dict(zip(tables[-1][0], cells, strict=True)))
        elif set(line.strip()) - set("─…"):
            others.append(line)
    return tables, others


def written(out):
    """Every table that a command left: its rows by title."""
    return [list(csv.DictReader(io.StringIO(path.read_text("utf-8")))) for path in out.glob("tables/*.csv")]


def is_row_of(shown, rows, is_fixed):
    """Whether a table has the cells shown; of figures that depend on the machine, only that it has their columns."""
    alike = [name for name, cell in shown.items() if cell != "…" and (is_fixed or not re.search(r"\d", cell))]
    return any(all(row[name] == shown[name] for name in alike) for row in rows)


def run(command, out, capsys):
    """Standard output of a command; trainstep alone and modules run in this process."""
    words = shlex.split(command)
    if words[0] == "python":
        with mock.patch.object(sys, "argv", words[2:]):
            runpy.run_module(words[2], run_name="__main__")
        return capsys.readouterr().out
    words += ["--out", str(out)] if "trainstep" in words or "examples.step8b" in words else []
    if words[0] == "trainstep":
        with pytest.raises(SystemExit) as stop:
            main(words[1:])
        printed = capsys.readouterr()
        assert stop.value.code == 0, f"{printed.out}{printed.err}"
        return printed.out
    modules = {"torchrun": ["-m", "torch.distributed.run"], "trainstep": ["-m", "trainstep"]}
    first = next(i for i, word in enumerate(words) if "=" not in word)
    environment = os.environ | dict(word.split("=") for word in words[:first])
    words = [sys.executable, *modules[words[first]], *words[first + 1 :]]
    found = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}"
    return found.stdout


def marked(command):
    marks = [pytest.mark.distributed] if command.startswith("torchrun") else []
    return [*marks, pytest.mark.thorough] if any(part in command for part in LONG) else marks


@pytest.mark.parametrize(
    ("command", "output"), [pytest.param(*each, marks=marked(each[0]), id=each[0]) for each in EXAMPLES]
)
def test_a_command_prints_what_the_page_shows(command, output, tmp_path, capsys):
    """The page may leave out columns, rows and lines."""
    is_fixed = command.startswith(FIXED)
    printed = " ".join(run(command, tmp_path, capsys).split())
    shown, others = parts(output)
    assert shown or others, "the page shows no output"
    found = written(tmp_path)
    for titles, rows in shown:
        tables = [table for table in found if table and table[0].keys() >= set(titles)]
        assert tables, f"no table has {titles}"
        assert [row for row in rows if not any(is_row_of(row, table, is_fixed) for table in tables)] == []
    if is_fixed:
        assert [line for line in others if " ".join(line.split()) not in printed] == []


def test_the_page_shows_enough_commands():
    """The expression that finds them would be free to find none."""
    assert len(EXAMPLES) >= 18
    assert sum(command.startswith("torchrun") for command, _ in EXAMPLES) >= 3
