"""Mutation testing of the judges: one small wrong change at a time to what says "right", "faster" or "look there".

A change that no test of its module notices is a survivor: printed, unless `mutants.toml` lists it as equivalent, with
the reason. Runs in copies of the tree; one process imports torch once and forks for every mutant, which runs only its
module's tests. Neither kept tool does that: mutmut (3.x) changes function bodies only, so no threshold at the top of a
module, and cosmic-ray starts a process, which imports torch, for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/trainstep"
STEP = ("step", "step_buffers", "step_random", "step_reference")
"""Tests of `check/step.py`."""
WITHOUT_PAGES = "-knot page and not section and not chart and not table"
"""The rules of the findings need no page, which takes seconds."""
JUDGES = {
    "base/stats.py": ("tests/base/test_stats.py",),
    "rows/records.py": ("tests/rows/test_records.py",),
    "measure/timing.py": ("tests/measure/test_timing.py",),
    "ladder/steps.py": ("tests/ladder/workloads/test_climb.py", "tests/ladder/workloads/test_told_times.py"),
    "ladder/ladder.py": (*("tests/ladder/test_ladders.py", "tests/ladder/test_climb.py"),),
    "check/verdict.py": tuple(
        f"tests/check/test_{name}.py"
        for name in ("verdict", "gradients", "updates", "script", "reproducible", "attention")
    ),
    "check/attention.py": ("tests/check/test_attention.py",),
    "check/buffers.py": ("tests/check/test_buffers.py",),
    "check/draws.py": ("tests/check/test_draws.py", "-knot accepted and not behind"),
    "check/dropout.py": ("tests/check/test_dropout.py",),
    "check/parts.py": ("tests/check/test_parts.py",),
    "check/gradients.py": ("tests/check/test_gradients.py", "tests/check/test_buffers.py"),
    "check/reference.py": tuple(f"tests/check/test_{name}.py" for name in ("reference", "reproducible", *STEP)),
    "check/rounding.py": tuple(f"tests/check/test_{name}.py" for name in ("rounding", "rounding_fused", "row_sums")),
    "check/row_sums.py": ("tests/check/test_row_sums.py",),
    "check/step.py": tuple(f"tests/check/test_{name}.py" for name in ("reproducible", *STEP)),
    "check/updates.py": ("tests/check/test_updates.py",),
    "check/ranks.py": ("tests/bench/parallel/test_check_little.py", "tests/bench/parallel/test_check.py"),
    "base/tolerance.py": (
        "tests/base/test_tolerance.py",
        *(f"tests/check/test_{name}.py" for name in ("gradients", "updates", "script", "reproducible", "buffers")),
        "tests/report/test_losses.py",
    ),
    "report/compare.py": ("tests/report/test_compare.py",),
    "report/losses.py": ("tests/report/test_losses.py",),
    "check/script.py": ("tests/check/test_script.py",),
} | {
    f"report/subjects/{name}.py": (*(f"tests/report/{test}.py" for test in tests), WITHOUT_PAGES)
    for name, *tests in (
        (
            "allocations",
            "test_cards",
            "subjects/test_thresholds",
            "subjects/test_peak_findings",
            "subjects/test_allocations",
        ),
        (
            "kernel_findings",
            "test_cards",
            "subjects/test_thresholds",
            "subjects/test_kernel_findings",
            "subjects/test_formulas",
        ),
        (
            "climbs",
            "test_findings",
            "test_summary",
            "subjects/test_thresholds",
            "subjects/test_ladder_findings",
            "subjects/test_script_ladder",
            "subjects/test_kernel_findings",
        ),
        (
            "ladder",
            "test_cards",
            "test_findings",
            "subjects/test_thresholds",
            "subjects/test_ladder_findings",
            "subjects/test_script_ladder",
        ),
        ("memory", "test_cards", "subjects/test_thresholds", "subjects/test_memory"),
        ("noise", "test_findings", "subjects/test_thresholds"),
        ("parallel", "test_cards", "subjects/test_parallel"),
        ("plan", "test_cards", "subjects/test_plan"),
        ("precision", "subjects/test_memory"),
        ("steps", "test_cards", "test_findings", "subjects/test_thresholds"),
        ("sweep", "subjects/test_sweep"),
    )
}
"""Files below `src/trainstep` and the tests that must notice; of `report/subjects` the rules of the findings alone."""
NEEDED = 0.95
RESULTS = ROOT / "docs/results/mutants.json"
"""What was judged of each file when, from which notebook/trust.md has its table."""
ON_GPU = "runs on a GPU only"
"""How the reason of a mutant begins that no test here can run."""
SLOW = ("ladder/steps.py", "check/reference.py", "check/step.py", "check/ranks.py")
"""Files whose tests train models, which takes minutes; a sample is drawn from the others."""
NOT_YET_JUDGED = {"check/ranks.py"}
"""Files that were rewritten, and whose mutants nobody has judged since: a run takes half an hour."""
WARM = ("torch", "torch._dynamo", "torch.distributed", "numpy", "pandas", "jinja2", "hypothesis",
        "pytest")  # fmt: skip
ORDER = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Div,), ast.Mod: (ast.Mult,), ast.Pow: (ast.Mult,), ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,), ast.And: (ast.Or,), ast.Or: (ast.And,),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "median": "median_low", "fmean": "median"}
DELETED = (ast.AugAssign, ast.Raise, ast.Continue, ast.Break)
TOLD = (ast.expr, ast.keyword, ast.comprehension, ast.arguments, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
SKIPPED = ("annotation", "returns", "decorator_list", "type_params", "type_comment", "ctx")


@dataclass(frozen=True)
class Mutant:
    """A changed source: `name` (function, what was and what is) finds it again where lines have moved."""

    file: str
    line: int
    name: str
    source: str = field(repr=False)


def replacements(node: ast.AST, returns: str | None) -> Iterator[ast.AST]:
    """What a node may be replaced by; `returns` is the enclosing function's annotation."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in ORDER[type(operator)]:
                yield ast.Compare(node.left, [*node.ops[:place], other(), *node.ops[place + 1 :]], node.comparators)
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in ORDER:
        for other in ORDER[type(node.op)]:
            yield type(node)(**dict(ast.iter_fields(node)) | {"op": other()})
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        changed = (node.value + 1, node.value - 1) if isinstance(node.value, int) else (node.value * 2, node.value / 2)
        yield from (ast.Constant(value) for value in changed if value != node.value)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in NAMES and isinstance(node.value, ast.Name):
        if node.value.id == "statistics":
            yield ast.Attribute(node.value, NAMES[node.attr])
    elif isinstance(node, ast.comprehension) and node.ifs:
        for place in range(len(node.ifs)):
            kept = node.ifs[:place] + node.ifs[place + 1 :]
            yield ast.comprehension(node.target, node.iter, kept, node.is_async)
    elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        spec = ast.unparse(node.format_spec)[2:-1]
        if digits := re.search(r"\.(\d+)g", spec):
            half = spec.replace(digits[0], f".{int(digits[1]) // 2}g")
            yield ast.FormattedValue(node.value, node.conversion, ast.JoinedStr([ast.Constant(half)]))
    elif isinstance(node, ast.Return) and returns == "bool" and not isinstance(node.value, (ast.Constant, NoneType)):
        yield ast.Return(ast.UnaryOp(ast.Not(), node.value))
    stored = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if stored or called or isinstance(node, DELETED):
        yield ast.Pass()


def rules_of(tree: ast.Module) -> set[str]:
    """The top-level names that functions which return findings use, directly or through others."""
    tops = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    tops |= {target.id: node for node in tree.body if isinstance(node, ast.Assign)
             for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
    names, reached = {name for name, node in tops.items()
                      if isinstance(node, ast.FunctionDef) and node.returns and "Finding" in ast.unparse(node.returns)
                      }, set()  # fmt: skip
    drawn = {
        name
        for name, node in tops.items()
        if re.search("Section|Chart|Table", ast.unparse(getattr(node, "returns", None) or ast.Pass()))
    }
    while names - reached - drawn:
        name = (names - reached - drawn).pop()
        reached.add(name)
        names |= {each.id for each in ast.walk(tops[name]) if isinstance(each, ast.Name)} & set(tops)
    return reached


def mutants_of(file: str, source: str, only: set[str] | None = None) -> list[Mutant]:
    """Every mutant of one file, in its order; `only` limits them to some top-level names."""
    tree = ast.parse(source)
    every: list[Mutant] = []
    seen: Counter[str] = Counter()

    def put(parent: Any, slot: str, place: int | None, new: ast.AST, old: ast.AST) -> None:
        if place is None:
            setattr(parent, slot, new)
        else:
            getattr(parent, slot)[place] = new

    def shown(node: ast.AST) -> str:
        text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
        return text if len(text) <= 100 else f"{text[:60]} … {text[-36:]}"

    def visit(parent: ast.AST, path: tuple[str, ...], returns: str | None, line: int) -> None:
        for slot, value in ast.iter_fields(parent):
            if slot in SKIPPED or (isinstance(parent, ast.Raise) and slot == "exc"):
                continue
            for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(node, ast.AST) or isinstance(node, (ast.Assert, ast.Import, ast.ImportFrom)):
                    continue
                if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                    continue
                at = getattr(node, "lineno", line)
                choices = list(replacements(node, returns))
                early = isinstance(node, ast.Return) and not (isinstance(parent, ast.FunctionDef) and slot == "body")
                choices += [ast.Pass()] if early else []
                told = parent if isinstance(parent, TOLD) else node
                for new in choices:
                    before = shown(told)
                    put(parent, slot, place, new, node)
                    after = shown(told) if told is parent else shown(new)
                    name = f"{'.'.join(path) or 'top'}: {before} → {after}"
                    seen[name] += 1
                    name += f" #{seen[name]}" if seen[name] > 1 else ""
                    every.append(Mutant(file, at, name, ast.unparse(ast.fix_missing_locations(tree))))
                    put(parent, slot, place, node, new)
                named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
                inner = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns else returns
                visit(node, (*path, node.name) if named else path, inner, at)

    for node in tree.body:
        told = {getattr(node, "name", "")} | {each.id for each in getattr(node, "targets", []) if hasattr(each, "id")}
        if only is None or told & only:
            visit(ast.Module([node], []), (), None, node.lineno)
    return every


Seconds = tuple[dict[str, float], dict[str, float]]
"""What tests take by their ids: before they start, fixtures shared with others among it, and themselves."""


class Order:
    """Plugin of pytest: first the tests that most likely notice soon, by their seconds and by what they noticed.

    Independent tests whose chances are p and seconds s find the first failure soonest in the order of s/p.
    """

    def __init__(
        self, setup_s: dict[str, float] | None = None, call_s: dict[str, float] | None = None,
        noticed: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        self.setup_s, self.call_s, self.noticed = setup_s or {}, call_s or {}, noticed or Counter()
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """The first test to ask for a fixture of its file pays for it: each of its users counts as the first."""

        def users(item: Any) -> Any:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            return item.nodeid.split("::")[0], *sorted(set(item.fixturenames) - set(parameters))

        shared: dict[Any, float] = {}
        for item in items:
            shared[users(item)] = max(shared.get(users(item), 0), self.setup_s.get(item.nodeid, 0))
        items.sort(
            key=lambda item: (
                (0.01 + shared[users(item)] + self.call_s.get(item.nodeid, 0)) / (0.1 + self.noticed[item.nodeid])
            )
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Its seconds, and whether it failed."""
        if report.when in ("setup", "call"):
            (self.setup_s if report.when == "setup" else self.call_s)[report.nodeid] = report.duration
        if report.failed:
            self.failed.append(report.nodeid)


class Lane:
    """A process with a copy of the tree of its own, which forks a child for every mutant."""

    def __init__(self, folder: Path) -> None:
        self.root = Path(tempfile.mkdtemp(dir=folder))
        self.writes = 0
        self.noticed: Counter[tuple[str, str]] = Counter()
        for path in ROOT.iterdir():
            if path.name in ("src", "tests", "tools"):
                shutil.copytree(path, self.root / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif not path.name.startswith("."):
                (self.root / path.name).symlink_to(path)

    def run(self, tests: Sequence[str], limit_s: float, order: Order) -> tuple[int | None, float]:
        """The tests' exit code (None: they ran for longer than the limit and were ended) and their seconds."""
        start, code = time.monotonic(), None
        if not (child := os.fork()):
            self._become_tests(tests, order)
        while code is None and time.monotonic() - start < limit_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what the tests started
        if code is None:
            os.waitpid(child, 0)
        return code, time.monotonic() - start

    def _become_tests(self, tests: Sequence[str], order: Order) -> None:
        code = 99
        try:
            os.setsid()
            os.chdir(self.root)
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            paths = [str(self.root / "src"), str(self.root)]
            sys.path[:] = paths + [path for path in sys.path if not path.startswith(str(ROOT / "tools"))]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            import pytest
            import torch

            torch.set_num_threads(1)
            gc.freeze()  # pytest collects garbage twice, which is slow with all of torch
            options = [
                "-xq",
                "--disable-plugin-autoload",
                "-p",
                "no:cacheprovider",
                "-p",
                "pytest_timeout",
                "--assert=plain",
            ]
            code = int(pytest.main([*options, *tests], plugins=[order]))
            (self.root / "order.json").write_text(json.dumps([order.setup_s, order.call_s, order.failed]))
        finally:
            os._exit(code)

    def _write(self, path: Path, source: str) -> None:
        """Each time with another date: Python tells what it compiled by a source's size and its date in seconds."""
        path.write_text(source)
        self.writes += 1
        os.utime(path, (self.writes, self.writes))

    def judge(self, mutant: Mutant, tests: Sequence[str], limit_s: float, seconds: Seconds) -> bool:
        """Whether the tests notice the mutant."""
        path = self.root / PACKAGE / mutant.file
        before = path.read_text()
        self._write(path, mutant.source)
        noticed = Counter({test: count for (file, test), count in self.noticed.items() if file == mutant.file})
        try:
            code, _ = self.run(tests, limit_s, Order(*seconds, noticed))
        finally:
            self._write(path, before)
        if code in (5, 99):  # 4 is a conftest.py that the mutant does not let be imported
            raise RuntimeError(
                f"{mutant.file}, {mutant.name}: pytest ended with {code}: {(self.root / 'log').read_text()}"
            )
        if code == 1:
            for test in json.loads((self.root / "order.json").read_text())[2]:
                self.noticed[mutant.file, test] += 1
        return code != 0


_lane: Lane


def _enter(folder: Path) -> None:
    global _lane
    _lane = Lane(folder)


def _baseline(tests: Sequence[str]) -> tuple[float, Seconds]:
    code, took = _lane.run(tests, 600, Order())
    if code:
        raise RuntimeError(f"{' '.join(tests)} fail without any mutant: {(_lane.root / 'log').read_text()[-3000:]}")
    setup, call, _ = json.loads((_lane.root / "order.json").read_text())
    return 10 + 5 * took, (setup, call)


def _judge(mutant: Mutant, tests: Sequence[str], limit_s: float, seconds: Seconds) -> tuple[Mutant, bool]:
    return mutant, _lane.judge(mutant, tests, limit_s, seconds)


def main() -> int:
    """Judge the mutants of the files asked for; 1 where too many survive, or where a listed mutant is none."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("files", nargs="*", help="below src/trainstep, as base/stats.py; without any, all judges")
    arguments.add_argument(
        "--sample", type=int, help="judge so many, chosen by the seed among the files whose tests take seconds"
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--verbose", action="store_true", help="print each mutant as it is judged")
    arguments.add_argument("--named", action="store_true", help="those of mutants_named.toml, each by its own test")
    asked = arguments.parse_args()
    start, commit = time.monotonic(), _commit()
    tests_of = {file: tests for pattern, tests in JUDGES.items() for file in files_of(pattern)}
    tests_of = {file: tests for file, tests in tests_of.items() if not asked.files or file in asked.files}
    equivalent = tomllib.loads((ROOT / "tools/trust/mutants.toml").read_text())
    every = [] if asked.named else [(mutant, tests_of[file]) for file in tests_of for mutant in mutants_of_judge(file)]
    known = {(mutant.file, mutant.name) for mutant, _ in every}
    listed = [] if asked.named else [(file, name) for file in tests_of for name in equivalent.get(file, {})]
    stale = [each for each in listed if each not in known]
    for file, name in stale:
        print(f"mutants.toml lists what is no mutant of {file}: {name}")
    wanted = named() if asked.named else [each for each in every if (each[0].file, each[0].name) not in listed]
    count = len(wanted)
    if asked.sample is not None:
        wanted = [each for each in wanted if asked.files or each[0].file not in SLOW]
        wanted = random.Random(asked.seed).sample(wanted, min(asked.sample, len(wanted)))
    for name in WARM:
        importlib.import_module(name)
    killed: Counter[str] = Counter()
    judged = Counter(mutant.file for mutant, _ in wanted)
    left, is_kept = judged.copy(), bool(commit and not asked.named and asked.sample is None)
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(asked.jobs, context, _enter, (Path(folder),)) as lanes,  # a Pool's may not have children
    ):
        needed = sorted({tests for _, tests in wanted})
        baselines = dict(zip(needed, lanes.map(_baseline, needed), strict=True))
        jobs = [lanes.submit(_judge, mutant, tests, *baselines[tests]) for mutant, tests in wanted]
        for done in as_completed(jobs):
            mutant, is_killed = done.result()
            file = mutant.file
            killed[file] += is_killed
            left[file] -= 1
            if asked.verbose or not is_killed:
                print("killed  " if is_killed else "survived", f"{file}:{mutant.line}: {mutant.name}", flush=True)
            if left[file]:
                continue
            reasons = equivalent.get(file, {})
            print(f"{file}: {killed[file]} of {judged[file]} killed, {len(reasons)} listed as equivalent", flush=True)
            if is_kept:
                mutants = sum(each.file == file for each, _ in every)
                _keep(file, _result(mutants, judged[file], killed[file], reasons, commit))
    share = killed.total() / len(wanted) if wanted else 1.0
    print(f"{killed.total()} of {len(wanted)} killed ({share:.1%}; {count} in all) in {time.monotonic() - start:.0f} s")
    return int(share < NEEDED or bool(stale))


def named() -> list[tuple[Mutant, tuple[str, ...]]]:
    """The mutants of mutants_named.toml, each with its test."""
    found = []
    for each in tomllib.loads((ROOT / "tools/trust/mutants_named.toml").read_text())["named"]:
        source = (ROOT / PACKAGE / each["file"]).read_text()
        assert each["old"] in source, f"{each['file']} has no {each['old']!r} to change: {each['what']}"
        line = source[: source.index(each["old"])].count("\n") + 1
        changed = source.replace(each["old"], each["new"])
        found.append((Mutant(each["file"], line, each["what"], changed), (each["test"],)))
    return found


def _result(mutants: int, judged: int, killed: int, listed: dict[str, str], commit: str) -> dict[str, Any]:
    on_gpu = sum(reason.startswith(ON_GPU) for reason in listed.values())
    counts = {"mutants": mutants, "judged": judged, "killed": killed}
    counts |= {"equivalent": len(listed) - on_gpu, "gpu": on_gpu}
    return counts | {"commit": commit, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _keep(file: str, result: dict[str, Any]) -> None:
    """A result takes the place of the same file's earlier one."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    every = sorted((before | {file: result}).items())
    RESULTS.write_text("{\n" + ",\n".join(f"{json.dumps(file)}: {json.dumps(each)}" for file, each in every) + "\n}\n")


def _commit() -> str:
    """Of the code that is judged; empty where there are changes to it, which no result is kept of."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return "" if git("status", "--porcelain", "src", "tests", "tools") else git("rev-parse", "--short=10", "HEAD")


def files_of(pattern: str) -> list[str]:
    """The files of an entry of `JUDGES`, relative to the package."""
    return sorted(path.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).glob(pattern))


def mutants_of_judge(file: str) -> list[Mutant]:
    """Every mutant of a file of `JUDGES`."""
    source = (ROOT / PACKAGE / file).read_text()
    rules = rules_of(ast.parse(source)) if file.startswith("report/subjects") else None
    return mutants_of(file, source, rules or None)  # a file without rules is what rules read: all of it


if __name__ == "__main__":
    sys.exit(main())
