"""`python -m tools.trust.planted`: check all injected bugs and all right variants, and keep docs/results/planted.json.

Rows are written to results/ as they come, so that a command that was interrupted goes on where it was, at the same
commit. With names of judges it asks those alone, and what the others said, and at which commit, stays.

How large a wrong is, is told apart from whether it is caught: in bf16 it is what the wrong does in float32, where
rounding does not blur it, over half of bf16's budget, which is the most that bf16's own roundings did. None stands for
what no number says: NaN, a gradient that is missing, ranks that differ; or where `step` has it already.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.workers import Workers
from tools.trust.planted import attention, buffers, dropping, parallel, passes, right, step, train
from trainstep.base.advice import Line
from trainstep.base.config import StepConfig
from trainstep.bench.step import StepCase, run_cases
from trainstep.check.reference import TRAINED_STEPS, Reference, gradients_at
from trainstep.check.step import START, StepCheck
from trainstep.check.verdict import Deviation, Verdict
from trainstep.ladder.change import Change
from trainstep.ladder.steps import climb
from trainstep.measure.environment import commit_of, describe
from trainstep.step.training_step import TrainingStep
from trainstep.step.workload import WorkloadSource

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "docs" / "results" / "planted.json"
BASE, WRONG = step.BASE, step.WRONG | buffers.WRONG
IN_FLOAT32 = dropping.WRONG | passes.WRONG
"""Wrongs that float32 shows, whatever the precision."""
RIGHT = right.RIGHT | dropping.RIGHT | passes.RIGHT
SOME = 6
"""Every so manieth planted step is put through the commands themselves."""
Found = tuple[bool, float | None]
"""Whether the judge calls it wrong, and its error as a share of what is allowed, or None."""


@dataclass(frozen=True)
class Case:
    """Something planted, and a judge of it."""

    judge: str
    what: str
    setting: str
    """Precision; of `train` the scheme."""
    wrong: bool
    judged: Callable[[], Found]

    @property
    def key(self) -> tuple[str, ...]:
        """What no other case has."""
        return self.judge, self.what, self.setting

    def row(self) -> dict[str, Any]:
        """Judged now. `rounding`: how many times what rounding does it is off, two allowances being one budget."""
        start = time.perf_counter()
        called, share = self.judged()
        size = None if share is None or not math.isfinite(share) else float(f"{2 * share:.3g}")
        seconds = round(time.perf_counter() - start, 2)
        named = {"judge": self.judge, "what": self.what, "setting": self.setting, "wrong": self.wrong}
        return named | {"called": called, "rounding": size, "seconds": seconds}


def share_of(found: Any, names: tuple[str, ...], budget: Any = None) -> float:
    """The largest of some errors over what is allowed, by `budget` where it is another's; infinite for NaN."""
    budget = budget or found
    pairs = [(getattr(found, name), getattr(budget, name.removesuffix("_error") + "_allowed")) for name in names]
    shares = [error / allowed if allowed else math.inf if error else 0.0 for error, allowed in pairs]
    return math.inf if any(map(math.isnan, shares)) else max(shares)


def of_gradients(found: Deviation, budget: Deviation | None = None) -> float:
    """Of loss and gradients."""
    return share_of(found, ("loss", "gradient", "scale", "worst"), budget)


def of_verdict(found: Verdict) -> float:
    """Of all that a verdict has."""
    deviations = [of_gradients(each) for each in (found.gradients, found.float32) if each is not None]
    return max([*deviations, *(each.share for each in found.parts.values())])


class Sized(StepCheck):
    """Holds gradients against bf16's budget, whatever precision they come from."""

    def _hold(self, step: TrainingStep, reference: Reference, place: int) -> Deviation:
        batch = step.next_batch() if place == START else step.place(reference.places[place].batch)
        return reference.compare(gradients_at(step, batch), place, "bf16")

    def share(self, config: StepConfig) -> float:
        """Of what bf16's budget allows, at the start and after training."""
        built, verdict = self.start(config)
        first = of_verdict(verdict)
        for _ in range(TRAINED_STEPS):
            built(built.next_batch())
        return max(first, of_verdict(self.end(built, verdict)))


def steps() -> Iterator[Case]:
    """Training steps: wrong in every precision, in bf16 alone, and right ones."""

    @functools.cache
    def judges(plain: WorkloadSource) -> tuple[StepCheck, Sized]:
        judge, sized = StepCheck(plain, BASE), Sized(plain, BASE)
        judge.judge(BASE)  # the plain step, which is the reference of all
        sized._references = judge._references
        return judge, sized

    def wrong(both: step.Planted, planted: step.Planted) -> Found:
        judge, sized = judges(both.plain)
        judge.source, sized.source = planted.source(), both.source()
        found = judge.judge(dataclasses.replace(BASE, **planted.change))
        if planted.only_in is None:
            return not found.is_right, of_verdict(found)
        return not found.is_right, sized.share(dataclasses.replace(BASE, **both.change))

    def accepted(source: WorkloadSource, base: StepConfig, config: StepConfig) -> Found:
        found = StepCheck(source, base).judge(config)
        return not found.is_right, of_verdict(found)

    for what, both in (WRONG | IN_FLOAT32).items():
        only_in = {} if what in IN_FLOAT32 else {"bf16": step.in_bf16_alone(both)}
        for precision, planted in ({"fp32": both} | only_in).items():
            yield Case("step", what, precision, True, functools.partial(wrong, both, planted))
    for what, (source, base, change) in RIGHT.items():
        config = dataclasses.replace(base, **change)
        precision = "fp32" if config.precision == "fp32" else "bf16"
        yield Case("step", what, precision, False, functools.partial(accepted, source, base, config))


def climbed(source: WorkloadSource, config: StepConfig, change: step.Change) -> bool:
    """Whether the ladder refuses a rung, and shows no speed of it."""
    changes = [Change("changed", Line(""), step=change)]
    row = list(climb(source, config, warmup=1, steps=1, changes=changes))[1]
    return row.status == "wrong" and row.step_ms is None


def benched(source: WorkloadSource, config: StepConfig, change: step.Change) -> bool:
    """The same of `bench step`."""
    (row,) = run_cases([StepCase(source, dataclasses.replace(config, **change), warmup=0, steps=1)])
    return row.status == "wrong" and row.step_ms is None


Refuses = Callable[[WorkloadSource, StepConfig, step.Change], bool]


def commands() -> Iterator[Case]:
    """Some of the steps, through `bench step` and the ladder: what is wrong is a row without a time."""

    def judged(refuses: Refuses, source: WorkloadSource, config: StepConfig, change: step.Change) -> Found:
        return refuses(source, config, change), None

    some: list[tuple[str, WorkloadSource, StepConfig, step.Change, bool]] = []
    for name in list(WRONG)[::SOME]:
        planted = step.in_bf16_alone(WRONG[name])
        some.append((name, planted.source(), BASE, planted.change, True))
    some += [(name, *RIGHT[name], False) for name in list(right.RIGHT)[::SOME]]
    for judge, refuses in {"ladder": climbed, "bench step": benched}.items():
        for what, source, config, change, is_wrong in some:
            precision = dataclasses.replace(config, **change).precision.removesuffix("-pure")
            yield Case(judge, what, precision, is_wrong, functools.partial(judged, refuses, source, config, change))


def attentions() -> Iterator[Case]:
    """Implementations of attention."""

    def judged(planted: attention.Planted, precision: str, wrong: bool) -> Found:
        exact, own = (planted.check(dtype) for dtype in (torch.float32, attention.PRECISIONS[precision]))
        found = exact.parts if wrong else own.parts
        sized = Verdict(parts={key: replace(part, error=found[key].error) for key, part in own.parts.items()})
        return not own.is_right, sized.nearest.share

    for what, planted, precision, wrong in attention.cases():
        yield Case("bench attention", what, precision, wrong, functools.partial(judged, planted, precision, wrong))


def parallels(two: Workers) -> Iterator[Case]:
    """Schemes on two ranks, beside one process."""

    @functools.cache
    def agreement(precision: str, what: str) -> Verdict:
        return two.run(parallel.judge_wrong, precision, [what])[0][what]

    def wrong(what: str, precision: str) -> Found:
        own, exact = agreement(precision, what), agreement("fp32", what)
        trained = [replace(own.parts[key], error=exact.parts[key].error).share for key in ("loss", "update")]
        assert exact.gradients is not None
        share = max(of_gradients(exact.gradients, own.gradients), own.parts["optimizer"].share, *trained)
        return not own.holds, None if exact.faults else share  # the first rank's own may be right

    def right(what: str) -> Found:
        own = two.run(parallel.judge_right, [what])[0][what]
        return (not own.holds, parallel.largest_share(own)) if isinstance(own, Verdict) else (True, None)

    for what in parallel.WRONG:
        for precision in parallel.PRECISIONS:
            yield Case("bench parallel", what, precision, True, functools.partial(wrong, what, precision))
    for what, (_, config, _, _) in parallel.RIGHT.items():
        precision = "fp32" if config.precision == "fp32" else "bf16"
        yield Case("bench parallel", what, precision, False, functools.partial(right, what))


def trains(two: Workers) -> Iterator[Case]:
    """Ranks of `train`, under each of its schemes; a wrong one is caught if every rank is refused."""

    def refused(what: str, scheme: str) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            found = two.run(train.refused, what, scheme, Path(folder) / "run")
        return all(found) if what in train.WRONG else any(found), None

    for what in (*train.WRONG, *train.RIGHT):
        for scheme in train.TRAINED:
            wrong, judged = what in train.WRONG, functools.partial(refused, what, scheme)
            yield Case("train", what, scheme, wrong, judged)


def all_cases(two: Workers) -> list[Case]:
    """All that is planted, with every judge of it; judging those of several ranks takes the workers."""
    return [*steps(), *commands(), *attentions(), *parallels(two), *trains(two)]


def commit_of_all() -> str:
    """The commit, with "+" where the judges or what is planted are changed."""
    return max((commit_of(ROOT / folder) for folder in ("src/trainstep", "tests", "tools")), key=len)


def main(*judges: str) -> None:
    """Judge all, or what these judges have, and keep it once there is all."""
    environment = describe(torch.device("cpu")) | {"commit": commit_of_all()}
    partial = ROOT / "results" / f"planted-{environment['commit']}.jsonl"
    if str(environment["commit"]).endswith("+"):
        print("the checkout has changes: it is judged from the start, and docs/render.py will refuse the file")
        partial.unlink(missing_ok=True)
    partial.parent.mkdir(exist_ok=True)
    with Workers(2, timeout_s=1800.0, limit_s=1800.0) as two, partial.open("a", encoding="utf-8") as file:
        cases = all_cases(two)
        if unknown := set(judges) - {case.judge for case in cases}:
            raise SystemExit(f"no judge is called {', '.join(unknown)}")
        known = _rows(partial)
        for number, case in enumerate(cases, 1):
            if case.key not in known and (not judges or case.judge in judges):
                row = case.row()
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                print(f"{number}/{len(cases)}", *row.values(), sep=" | ", flush=True)
    kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {"environments": {}, "cases": []}
    rows = _by_key(kept["cases"]) | _rows(partial)
    if missing := [case for case in cases if case.key not in rows]:
        print(f"{len(missing)} of {len(cases)} are not judged yet, by {', '.join({case.judge for case in missing})}")
        return
    judged = {case.judge for case in cases if not judges or case.judge in judges}
    environments = kept["environments"] | dict.fromkeys(judged, environment)
    lines = ",\n".join(json.dumps(rows[case.key], ensure_ascii=False) for case in cases)
    about = json.dumps(environments)
    KEPT.write_text(f'{{"environments": {about},\n"cases": [\n{lines}\n]}}\n', encoding="utf-8")
    partial.unlink()


def _rows(partial: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    return _by_key([json.loads(line) for line in partial.read_text("utf-8").splitlines()])


def _by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
    return {(row["judge"], row["what"], row["setting"]): row for row in rows}


if __name__ == "__main__":
    main(*sys.argv[1:])
