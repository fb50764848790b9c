"""metrics.jsonl has every update once; the terminal shows some; a record's speed is the last start's."""

import contextlib
import dataclasses
import io
import json
import resource

import pytest
import torch
from rich.console import Console

from tests.train.runs import config
from trainstep.base.errors import UsageError
from trainstep.parallel.process import Process
from trainstep.rows import TrainRow
from trainstep.rows.records import Times
from trainstep.train.history import WARMUP, read_metrics
from trainstep.train.metrics import MetricsWriter, Show, as_summary, run_record

ROW = {"loss": 2.5, "learning_rate": 3e-4, "gradient_norm": 1.25, "tokens_per_s": 12345.6, "utilisation": None,
       "validation_loss": None}  # fmt: skip
ALONE = Process(0, 1, torch.device("cpu"), None)


def test_rows_after_the_checkpoint_are_cut_when_a_run_goes_on(tmp_path):
    with MetricsWriter(tmp_path, step=0, tensorboard=False) as writer:
        for step in range(1, 8):
            writer.write({"step": step, "loss": step / 2})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 8, "lo')  # the process was killed here
    with MetricsWriter(tmp_path, step=5, tensorboard=False) as writer:
        writer.write({"step": 6, "loss": 30.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.5), (6, 30.0),
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("damage", [b'{"step": 3, "lo\n', b"\xff\xfe\n", b"[3]\n", b"\0\0\0\n", b"\n"])
def test_a_damaged_line_is_named_and_the_rows_after_it_stay(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n{"step": 2}\n' + damage + b'{"step": 4}\n'
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line 3 is damaged \(.*mend that line or delete it"):
        MetricsWriter(tmp_path, step=4, tensorboard=False)
    assert path.read_bytes() == content


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"\0\0\0", b"\xe2\x82"])
def test_a_torn_last_line_is_cut(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    assert read_metrics(path) == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}], "only its end is missing"


@contextlib.contextmanager
def room_for(size):
    """Files that grow no further than so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_until_full(writer):
    for step in range(1, 20):
        writer.write({"step": step, "loss": 0.5})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread
@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_is_said_once_and_whole_rows_stay(tmp_path, tensorboard):
    """Closing the files afterwards must not raise an error of its own in this one's place."""
    said = r"cannot write .*(metrics\.jsonl|tensorboard): .*; see that there is room there, then give the same"
    with (
        pytest.raises(UsageError, match=said),
        room_for(310),
        MetricsWriter(tmp_path, step=0, tensorboard=tensorboard) as writer,
    ):
        write_until_full(writer)
    path = tmp_path / "metrics.jsonl"
    assert path.stat().st_size == 310 or tensorboard, "a part of the last row"
    with room_for(10), pytest.raises(UsageError, match=said):
        MetricsWriter(tmp_path, step=1, tensorboard=False)
    made = [row["step"] for row in read_metrics(path)]
    assert made == list(range(1, len(made) + 1)) != []
    with MetricsWriter(tmp_path, step=len(made), tensorboard=tensorboard) as writer:
        writer.write({"step": len(made) + 1, "loss": 0.5})
    assert [row["step"] for row in read_metrics(path)] == [*made, len(made) + 1]


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    with MetricsWriter(tmp_path, step=0, tensorboard=False) as writer:
        writer.write({"step": 1, "loss": 1.0})
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MetricsWriter(None, step=0, tensorboard=True) as writer:
        writer.write({"step": 1, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_the_curves_without_what_was_cut(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, step=0, tensorboard=True) as writer:
        for step in (1, 2, 3):
            writer.write({"step": step, "loss": float(step), "validation_loss": None, "utilisation": None})
    with MetricsWriter(tmp_path, step=1, tensorboard=True) as writer:
        writer.write({"step": 2, "loss": 20.0, "validation_loss": 7.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    assert [(each.step, each.value) for each in events.Scalars("validation_loss")] == [(2, 7.0)]
    assert "utilisation" not in events.Tags()["scalars"]


def shown(rows, **options):
    console = Console(file=io.StringIO(), width=200, **options)
    show = Show(console, log_every=10)
    with show.progress(30, 0):
        for row in rows:
            show.update(row)
    return console.file.getvalue()


def test_the_first_every_tenth_and_validated_updates_are_lines():
    rows = [ROW | {"step": step} for step in range(1, 31)]
    rows[14] |= {"validation_loss": 2.75, "utilisation": 0.415}
    lines = shown(rows).splitlines()
    assert [line.split()[1] for line in lines] == ["1", "10", "15", "loss", "20", "30"]
    assert lines[0] == "update     1  loss 2.5000  lr 3.00e-04  norm 1.25  12,346 tokens/s"
    assert lines[2].endswith("  42 % util")
    assert lines[3].strip() == "validation loss 2.7500"
    assert max(map(len, lines)) <= 80


def test_on_a_terminal_there_is_a_bar_too():
    assert "30/30" in shown([ROW | {"step": step} for step in range(1, 31)], force_terminal=True)


def test_other_ranks_are_silent(capsys):
    show = Show(None, log_every=1)
    with show.progress(3, 0):
        show.update(ROW | {"step": 1})
        show.line("nothing")
    assert capsys.readouterr().out == ""


def test_a_summary_leaves_out_what_was_not_measured():
    record = TrainRow(validation_loss=2.0, n=7, times={"step": Times(123.456)}, tokens_per_s=5000.0)
    assert as_summary(record) == "validation loss 2.0000  median of 7 updates: 123.5 ms, 5,000 tokens/s"
    assert as_summary(TrainRow(validation_loss=2.0, n=0)) == "validation loss 2.0000"
    assert as_summary(dataclasses.replace(record, utilisation=0.4, peak_gib=12.3)).endswith(
        "utilisation 40.0 %  peak 12.3 GiB on a rank"
    )


def rows_of(*starts):
    """Metrics of starts one after the other, each so many updates of so many milliseconds."""
    found = []
    for count, milliseconds in starts:
        first = len(found)
        found += [
            {"step": first + number, "since_start": number, "step_ms": 1000.0 if number <= WARMUP else milliseconds,
             "loss": 9.0 - 0.01 * (first + number), "validation_loss": None, "utilisation": None,
             "tokens_per_s": 256.0 if number <= WARMUP else 256e3 / milliseconds,
             "tokens": 256 * (first + number)}
            for number in range(1, count + 1)
        ]  # fmt: skip
    found[-1]["validation_loss"] = 2.0
    return found


@pytest.mark.parametrize(
    ("starts", "peak", "expected"),
    [
        (((40, 8.0), (WARMUP + 9, 2.0)), 2**30, {"n": 9, "step_ms": 2.0, "tokens_per_s": 128e3, "peak_gib": 1.0}),
        (((40, 8.0), (3, 2.0)), None, {"n": 3, "step_ms": 1000.0, "tokens_per_s": 256.0, "peak_gib": None}),
        (((40, 8.0),), 2**30, {"n": 0, "step_ms": None, "tokens_per_s": None, "peak_gib": None}),
    ],
    ids=["the last start's", "of fewer updates than its first ones", "after the last update"],
)
def test_updates_of_earlier_starts_are_in_the_curve_and_not_in_the_speed(starts, peak, expected):
    made = rows_of(*starts)
    values = run_record(config(), ALONE, made, 40, peak).values
    assert {name: values.get(name) for name in expected} == expected
    assert (values["first_loss"], values["tokens"], values["validation_loss"]) == (8.99, 256 * len(made), 2.0)
