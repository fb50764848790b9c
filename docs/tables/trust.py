"""Tables of the checks: injected bugs; intervals on the A/A corpus, and as other tools have them.

The rules of the other tools are written from their documents, each cited; none of their code is here.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tables import RESULTS, kept, where
from trainstep.base.stats import ratio_of_medians, ratio_of_runs, run_deviation, smallest_found, verdict
from trainstep.report.numbers import NONE, number
from trainstep.report.tables import Table, text_table
from trainstep.rows import StepRow
from trainstep.rows.records import by_case, of_kind, read_records

Run = Sequence[float]
CORPORA = tuple(sorted(path.stem for path in RESULTS.glob("aa-*.jsonl")))


def criterion(a: Run, b: Run) -> bool:
    """criterion.rs calls a change where a bootstrapped t test of the means has p < 0.05 and the whole 95 % interval of
    the relative change lies beyond its noise threshold of 1 % (its book: "Analysis Process", "Advanced Configuration").
    """
    rng, draws = np.random.default_rng(0), 1000
    x, y = np.asarray(a), np.asarray(b)

    def t(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        variance = x.var(-1, ddof=1) / x.shape[-1] + y.var(-1, ddof=1) / y.shape[-1]
        return (x.mean(-1) - y.mean(-1)) / np.sqrt(variance)

    pooled = rng.choice(np.concatenate([x, y]), (draws, len(x) + len(y)))
    p = np.mean(np.abs(t(pooled[:, : len(x)], pooled[:, len(x) :])) >= abs(t(x, y)))
    change = rng.choice(y, (draws, len(y))).mean(-1) / rng.choice(x, (draws, len(x))).mean(-1) - 1
    low, high = np.quantile(change, (0.025, 0.975))
    return bool(p < 0.05 and (low > 0.01 or high < -0.01))


def hyperfine(a: Run, b: Run) -> bool:
    """hyperfine prints "1.03 ± 0.02 times faster" of mean times, σ by propagation, and calls nothing; counted here is
    where the ratio is further from 1 than its σ (its README, and src/benchmark/relative_speed.rs)."""
    slow, fast = sorted((a, b), key=statistics.fmean, reverse=True)
    ratio = statistics.fmean(slow) / statistics.fmean(fast)
    sigma = ratio * math.hypot(*(statistics.stdev(each) / statistics.fmean(each) for each in (slow, fast)))
    return ratio - sigma > 1


def nvbench(a: Run, b: Run) -> bool:
    """nvbench_compare.py says FAST or SLOW where means differ by more than the lesser of the two relative standard
    deviations (NVIDIA/nvbench, issue 316, which reports its rate of false claims)."""
    noise = min(statistics.stdev(each) / statistics.fmean(each) for each in (a, b))
    return abs(statistics.fmean(b) / statistics.fmean(a) - 1) > noise


def ours_within(a: Run, b: Run) -> bool:
    """Faster or slower "within this run"."""
    return verdict(ratio_of_medians(a, b)) != "inconclusive"


TOOLS: Mapping[str, Callable[[Run, Run], bool]] = {
    "ours, within this run": ours_within,
    "criterion": criterion,
    "hyperfine": hyperfine,
    "nvbench": nvbench,
}


def _settings() -> Iterator[tuple[str, str, list[StepRow]]]:
    """Every setting of every corpus: the corpus, the setting in words, and its rows, one per run."""
    for name in CORPORA:
        for rows in by_case(of_kind(read_records(RESULTS / f"{name}.jsonl"), StepRow), "run"):
            row = rows[0]
            yield name, f"{row.workload}, {row.batch} × {row.context}, {row.precision}", rows


def groups(runs: Sequence[Run], size: int) -> list[Sequence[Run]]:
    """Disjoint groups of runs that followed one another."""
    return [runs[start : start + size] for start in range(0, len(runs) - size + 1, size)]


def false_calls(group: Sequence[Run]) -> tuple[int, int]:
    """Of all ways to make two arms of a group: how many are called, and how many there are."""
    first, *others = range(len(group))
    called = []
    for chosen in itertools.combinations(others, len(group) // 2 - 1):
        arm = [group[index] for index in (first, *chosen)]
        rest = [group[index] for index in others if index not in chosen]
        called.append(verdict(ratio_of_runs(arm, rest)) != "inconclusive")
    return sum(called), len(called)


def false_call_table() -> Table:
    """Who calls equal arms different, and how often."""
    lines, totals = [], dict[str, list[int]]()
    rows: list[StepRow] = []
    for corpus, words, of_setting in _settings():
        rows += of_setting
        runs = [row.samples["step"] for row in of_setting]
        found: dict[str, list[int]] = {}
        for size in (3, 5):
            counts = [false_calls(group) for group in groups(runs, 2 * size)]
            found[f"ours, {size} runs a side"] = [sum(column) for column in zip(*counts, strict=True)] or [0, 0]
        pairs = groups(runs, 2)
        found |= {tool: [sum(says(a, b) for a, b in pairs), len(pairs)] for tool, says in TOOLS.items()}
        for who, (called, ways) in found.items():
            total = totals.setdefault(who, [0, 0])
            totals[who] = [total[0] + called, total[1] + ways]
        median = number(statistics.median(statistics.median(run) for run in runs))
        lines.append((f"{corpus}: {words}", str(len(runs)), median, *(_share(*each) for each in found.values())))
    lines.append(("all", str(len(rows)), "", *(_share(*each) for each in totals.values())))
    caption = f"False calls in per cent of pairs of equal arms; {where(rows)}"
    return text_table("aa", caption, ("setting", "runs", "step (ms)", *totals), lines)


def _share(called: int, ways: int) -> str:
    return f"{100 * called / ways:.1f}" if ways else "–"


def power_table() -> Table:
    """What runs differ by, and the smallest difference that so many runs find 9 times of 10."""
    lines, rows = [], list[StepRow]()
    for corpus, words, of_setting in _settings():
        rows += of_setting
        runs = [row.samples["step"] for row in of_setting]
        within = statistics.median(run_within(run) for run in runs)
        deviation = run_deviation(*groups(runs, 6))  # as `bench ab` sees it: drift beyond a group is not in it
        found = [number(100 * smallest_found(deviation, size), 2) for size in (3, 5, 10, 20)]
        lines.append((f"{corpus}: {words}", number(100 * within, 2), number(100 * deviation, 2), *found))
    wanted = ("setting", "steps differ by, std (%)", "runs differ by, std (%)",
              *(f"{size} runs a side find (%)" for size in (3, 5, 10, 20)))  # fmt: skip
    return text_table("aa-power", f"Differences found 9 times of 10; {where(rows)}", wanted, lines)


def run_within(run: Run) -> float:
    """The relative standard deviation of a run's steps, by the quartiles, which one late step does not move."""
    first, middle, third = statistics.quantiles(run, n=4, method="inclusive")
    return (third - first) / 1.349 / middle


LARGE = 3.0
"""Times rounding: what is further off than that has to be caught."""
Case = Mapping[str, Any]


def planted() -> tuple[list[Case], str]:
    """What `python -m tools.trust.planted` kept, and where it ran."""
    found = kept("planted.json")
    return found["cases"], where([StepRow(environment=each) for each in found["environments"].values()])


def is_large(case: Case) -> bool:
    """Whether it is more than three times rounding off, or more than a number says; in float32 all that is planted is,
    so that what a judge does not see there at all is no excuse."""
    return case["setting"] != "bf16" or case["rounding"] is None or case["rounding"] > LARGE


def planted_table() -> Table:
    """How many wrongs each judge catches, and how many right variations it calls wrong."""
    cases, place = planted()
    groups = {(case["judge"], case["setting"]): [0] * 6 for case in cases}
    for case in cases:
        wrong, called, large = case["wrong"], case["called"], case["wrong"] and is_large(case)
        counts = (wrong, wrong and called, large, large and called, not wrong, not wrong and called)
        key = case["judge"], case["setting"]
        groups[key] = [a + int(b) for a, b in zip(groups[key], counts, strict=True)]
    total = [sum(column) for column in zip(*groups.values(), strict=True)]
    lines = [(*key, *map(str, counts)) for key, counts in groups.items()] + [("all", "", *map(str, total))]
    different = [len({case["what"] for case in cases if case["wrong"] is wrong}) for wrong in (True, False)]
    caption = f"{different[0]} wrongs and {different[1]} right variations; {place}"
    wanted = ("judge", "in", "wrongs judged", "caught", "above 3 × rounding", "of these caught", "right judged",
              "called wrong")  # fmt: skip
    return text_table("planted", caption, wanted, lines)


def wrongs_table() -> Table:
    """Every wrong: how large it is, who catches it and who does not."""
    cases, place = planted()
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case["wrong"]:  # the commands take steps that the check of steps has too
            family = "step" if case["judge"] in ("ladder", "bench step") else case["judge"]
            found.setdefault((family, case["what"]), []).append(case)
    lines = []
    for (_, what), of_wrong in found.items():
        sizes = {case["setting"]: number(case["rounding"], 2) for case in of_wrong if case["rounding"] is not None}
        missed = [f"{case['judge']} in {case['setting']}" for case in of_wrong if not case["called"]]
        caught = dict.fromkeys(case["judge"] for case in of_wrong if case["called"])
        lines.append((what, sizes.get("fp32", NONE), sizes.get("bf16", NONE), ", ".join(caught), ", ".join(missed)))
    wanted = ("wrong", "times rounding of fp32", "of bf16", "caught by", "missed by")
    return text_table("planted-wrongs", f"How large each wrong is and who catches it; {place}", wanted, lines)


def headline() -> Table:
    """Sums of both tables for README.md."""
    bugs, calls = planted_table().texts()[-1], false_call_table()
    wanted = (
        "injected bugs caught",
        "correct variations rejected",
        *(f"false alarms (%): {who}" for who in calls.columns[3:]),
    )
    line = (f"{bugs[3]} of {bugs[2]}", f"{bugs[7]} of {bugs[6]}", *calls.texts()[-1][3:])
    return text_table("readme-trust", "Sums of all cases", wanted, [line])


TABLES = {
    "readme-trust": headline,
    "planted": planted_table,
    "planted-wrongs": wrongs_table,
    "aa": false_call_table,
    "aa-power": power_table,
}
