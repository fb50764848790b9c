"""Training runs: their curves, where they were saved and started again, what the ranks took, and the runs' table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_high
from typing import Any

from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Facts, Headline, Section, section, told_apart
from trainstep.report.charts import KINDS
from trainstep.report.charts.lines import Series, key_of, lines
from trainstep.report.columns import Cell
from trainstep.report.findings import Finding, found
from trainstep.report.numbers import in_ms, number
from trainstep.report.tables import Table, define, page_table, text_table
from trainstep.rows import TrainRow
from trainstep.rows.records import Row, Scalar, of_kind

LATE = 0.1
"""A rank that takes longer than the others' median by this share of it is late."""
WAITING = 0.05
"""Share of a run's time that validations or checkpoints may take without a word."""
MOST_RANKS = 32  # that are shown, the slowest ones

RUNS = define(
    TrainRow,
    "Training runs: losses in nats per token; speed is the median over updates after the first ones",
    *columns.SETTINGS,
    columns.case("ranks", "world_size"),
    *columns.cases({"global batch": "global_batch", "batches per update": "batches_per_update", "updates": "steps"}),
    columns.word("scheme", "scheme"),
    *columns.cases({"replicas": "replicas", "blocks a group": "blocks_per_group"}),
    columns.COUNTED,
    *columns.values({"first loss": "first_loss", "last loss": "last_loss"}, digits=5),
    columns.value("validation loss", "validation_loss", digits=5),
    columns.median("update (ms) [95 %]", "step"),
    columns.count("tokens/s", "tokens_per_s"),
    *columns.values({"utilisation (%)": "utilisation", "peak (GiB)": "peak_gib"}),
    columns.OUTCOME,
)


def progress(rows: Sequence[Row]) -> Iterator[Finding]:
    """Restarts, and what had to be trained once more."""
    for row in of_kind(rows, TrainRow):
        if (row.starts or 1) > 1:
            said = (
                "{run} was started {starts:n} times; {again:n} of its {done:n} updates had been made before and were "
            )
            said += "lost with the process."
            figures: dict[str, Scalar] = {"starts": row.starts, "again": row.trained_again or 0, "done": row.done}
            yield found("training.restarts", said, run=str(row.workload), **figures)


def waits(rows: Sequence[Row]) -> Iterator[Finding]:
    """Validations and checkpoints that take a notable part of the run."""
    for row in of_kind(rows, TrainRow):
        for what, share in (("validation", row.validation_share), ("checkpoint", row.checkpoint_share)):
            if share is not None and share >= WAITING:
                flag = "--eval-every" if what == "validation" else "--save-every"
                said = (
                    f"{{run}} waits for its {what}s during {{share:share}} of its time; a larger {flag} makes it less."
                )
                yield found(f"training.{what}", said, run=str(row.workload), share=share)


def late_ranks(rows: Sequence[Row]) -> Iterator[Finding]:
    """The rank whose own part of an update is later than the others', and whether its data make it so."""
    for row in of_kind(rows, TrainRow):
        own = _numbers(row, "ranks_own_ms")
        data = _numbers(row, "ranks_data_ms")
        times = own or data
        if len(times) < 2:
            continue
        # The rank's own part is what tells: in a collective all ranks take as long as the latest.
        late = times.index(max(times))
        usual = median_high(times[:late] + times[late + 1 :])
        step = row.times["step"].median if "step" in row.times else 0.0
        # Late by share of the others and of the update: microseconds between idle ranks are no news.
        if times[late] < (1 + LATE) * usual or times[late] - usual < LATE * step:
            continue
        figures: dict[str, Scalar] = {"rank": late, "own_ms": times[late], "usual_ms": usual, "run": str(row.workload)}
        if own and data:
            more = data[late] - median_high(data[:late] + data[late + 1 :])
            said = "{run}: rank {rank} is late: until it waits for the others an update takes it {own_ms:ms}, and them "
            said += "{usual_ms:ms}"
            if more > (times[late] - usual) / 2:
                said += "; its batches take {data_ms:ms} longer to draw"
            yield found("ranks.late_training", f"{said}.", **figures, data_ms=more)
        else:
            said = "{run}: rank {rank} draws its batches in {own_ms:ms} an update, the others in {usual_ms:ms}."
            yield found("ranks.late_data", said, **figures)


def headline(rows: Sequence[Row]) -> Headline | None:
    """The loss of a run, and how far it has come; None of several."""
    every = of_kind(rows, TrainRow)
    row = every[0] if len(every) == 1 else None
    if row is None or row.done is None or row.last_loss is None:
        return None
    of = f" of {number(row.steps)}" if row.steps else ""
    again = f"{number(row.trained_again)} updates" if row.trained_again else "nothing"
    step = row.times["step"].median if row.tokens_per_s is None and "step" in row.times else None
    known: list[tuple[str, Scalar, Callable[[Any], str], str]] = [
        ("Validation", row.validation_loss, partial(number, digits=5), "loss, the last one"),
        ("Throughput", row.tokens_per_s, number, "tokens/s, the median of its last start"),
        ("Update", step, in_ms, "the median of its last start"),
        ("Utilisation", row.utilisation, "{:.1%}".format, "model FLOPs over the devices’ peak"),
    ]
    stats = [(name, text(value), note) for name, value, text, note in known if value is not None]
    stats.append(("Starts", number(row.starts), f"{again} made again"))
    detail = f"from {number(row.first_loss, 5)} at the first"
    says = f"loss after update {number(row.done)}{of}"
    return Headline(Cell(number(row.last_loss, 5), row.last_loss, "last_loss"), says, detail, stats)


def training(rows: Sequence[Row]) -> Section | None:
    """Curves of runs whose metrics were read; the table of all."""
    drawn = [row for row in of_kind(rows, TrainRow) if row.series.get("learning_rate")]
    blocks: list[Block] = [Charts(list(_curves(drawn)))] if drawn else []
    for place, row in enumerate(drawn):
        which = "" if len(drawn) == 1 else f": {_name(row, drawn)}"
        if (ranks := _ranks(row, place, which)) is not None:
            blocks.append(ranks)
        if len(row.series.get("start_step", ())) > 1:
            blocks.append(_starts(row, place, which))
        named = [("Run", Cell(_name(row, drawn)))] if which else []
        blocks.append(Facts([*named, *_facts(row)], f"training{f'-{place}' if place else ''}"))
    width = max((-(-(row.done or 0) // max(1, len(row.series["step"]))) for row in drawn), default=1)  # of a point
    lead = f"Each point is of {width} updates: means, and medians of times." if width > 1 else ""
    return section("training", "Training", "Training runs", lead, *blocks, page_table(RUNS, rows))


def _name(row: TrainRow, rows: Sequence[TrainRow]) -> str:
    """The shortest that tells it from the others."""
    ways: list[Callable[[TrainRow], str]] = [
        lambda each: str(each.workload),
        lambda each: f"{each.scheme} on {number(each.world_size)}",
        lambda each: told_apart(each, rows),
    ]
    way = next((way for way in ways if len({way(each) for each in rows}) == len(rows)), None)
    place = next(place for place, each in enumerate(rows, start=1) if each is row)
    return f"run {place}" if way is None else way(row)


def _numbers(row: TrainRow, name: str) -> list[float]:
    values = [value for value in row.series.get(name, ()) if isinstance(value, (int, float))]
    return [float(value) for value in values] if len(values) == len(row.series.get(name, ())) else []


def _points(row: TrainRow, name: str, at: str = "step", scale: float = 1.0) -> tuple[list[float], list[float]]:
    """x and y of a curve, where it has a value."""
    pairs: list[tuple[Any, Any]] = list(zip(row.series.get(at, ()), row.series.get(name, ()), strict=True))
    known = [(float(x), scale * float(y)) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _curves(rows: Sequence[TrainRow]) -> Iterator[Chart]:
    is_one = len(rows) == 1
    roles = ["accent"] if is_one else [KINDS[place % len(KINDS)] for place in range(len(rows))]
    names = ["training"] if is_one else [_name(row, rows) for row in rows]
    of_rows = list(zip(rows, names, roles, strict=True))
    series = [Series(name, *_points(row, "loss"), role, texts=_texts(row, "loss")) for row, name, role in of_rows]
    for row, name, role in of_rows:
        x, y = _points(row, "validation_loss", "validation_step")
        if y:
            told, kind = ("validation", KINDS[2]) if is_one else (f"{name}, validation", role)
            series.append(Series(told, x, y, kind, width=1.2, dash="dashed", markers=len(x) <= 60))
    marks = [start - 0.5 for start in _points(rows[0], "start_step", "start_step")[0][1:]] if is_one else []
    legend = key_of(series)
    if is_one:
        x, y = _points(rows[0], "saved_loss", "saved_step")
        if y:
            series.append(Series("checkpoint", x, y, "neutral", width=0, markers=True, texts=()))
            legend.append(("neutral", "checkpoint"))
        legend += [("warn", "restart")] if marks else []
    yield Chart("training-loss", "Loss", "", partial(lines, series, "update", "loss", marks=marks), legend)
    speed = "tokens_per_s" if any(_points(row, "tokens_per_s")[1] for row in rows) else "step_ms"
    rest: list[tuple[str, str, str, str, float, bool]] = [
        ("throughput", "Throughput" if speed == "tokens_per_s" else "Time of an update", speed,
         "tokens/s" if speed == "tokens_per_s" else "ms", 1.0, False),
        ("utilisation", "Utilisation", "utilisation", "% of the peak", 100.0, False),
        ("norm", "Gradient norm before clipping", "gradient_norm", "norm", 1.0, True),
        ("rate", "Learning rate", "learning_rate", "learning rate", 1.0, False),
    ]  # fmt: skip
    for name, title, value, axis, scale, log in rest:
        curves = [Series(which, *_points(row, value, scale=scale), role) for row, which, role in of_rows]
        shown = [one for one in curves if one.y]
        if not shown:
            continue
        is_log = log and all(y > 0 for one in shown for y in one.y)
        legend = [] if is_one else key_of(shown)
        named = [replace(one, name=axis) for one in shown] if is_one else shown
        yield Chart(
            f"training-{name}", title, "", partial(lines, named, "update", axis, log=is_log, marks=marks), legend
        )


def _texts(row: TrainRow, name: str) -> list[str]:
    return [number(y, 5) for y in _points(row, name)[1]]


def _ranks(row: TrainRow, place: int, which: str) -> Table | None:
    own, data = _numbers(row, "ranks_own_ms"), _numbers(row, "ranks_data_ms")
    times = own or data
    if len(times) < 2:
        return None
    slowest = sorted(sorted(range(len(times)), key=lambda rank: -times[rank])[:MOST_RANKS])
    columns = {"until it waits for the others (ms)": own, "drawing batches (ms)": data}
    shown = {title: values for title, values in columns.items() if values}
    left_out = f", the slowest {MOST_RANKS} of {len(times)}" if len(times) > MOST_RANKS else ""
    caption = f"An update on each rank{left_out}{which}: medians over its last start, by the rank’s own clock"
    if not own:
        caption += ". With sharded weights ranks wait for each other all along, so no other time is one rank’s alone"
    cells = [[number(rank), *(number(values[rank]) for values in shown.values())] for rank in slowest]
    return text_table(f"training-ranks{f'-{place}' if place else ''}", caption, ["rank", *shown], cells)


def _starts(row: TrainRow, place: int, which: str) -> Table:
    names = ("start_step", "start_ranks", "start_scheme", "start_again", "start_ms")
    told: list[Callable[[Any], str]] = [number, number, lambda word: word or "–", number, number]
    cells = [
        [tell(value) for tell, value in zip(told, line, strict=True)]
        for line in zip(*(row.series[name] for name in names), strict=True)
    ]
    titles = ["from update", "ranks", "scheme", "updates made again", "update (ms), median"]
    return text_table(f"training-starts{f'-{place}' if place else ''}", f"Starts of the run{which}", titles, cells)


def _facts(row: TrainRow) -> list[tuple[str, Cell]]:
    made, saved = number(row.done), len(row.series.get("saved_step", ()))
    known: list[tuple[str, str, Scalar, str]] = [
        ("Updates made", f"{made} of {number(row.steps)}" if row.steps else made, row.done, "done"),
        ("Tokens", number(row.tokens), row.tokens, "tokens"),
        ("Checkpoints", number(saved), saved, "saved"),
    ]
    for name, share in (("validation", row.validation_share), ("checkpoint", row.checkpoint_share)):
        known += [(f"Waiting for {name}s", f"{share:.2%} of the time", share, f"{name}_share")] if share else []
    return [(name, Cell(text, value, column)) for name, text, value, column in known if value is not None]


TABLES = (RUNS,)
RULES = (progress, waits, late_ranks)
SECTIONS = (training,)
