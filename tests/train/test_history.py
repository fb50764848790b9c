"""A run's page from its metrics alone: of one that was killed, of one of an earlier version, while it trains."""

import json
import shlex
import shutil
import signal
import time

import pytest

from tests.train.runs import alone, config, names, on_rank, rows
from trainstep.base.errors import UsageError
from trainstep.commands.cli import main
from trainstep.report.compare import compare
from trainstep.rows import TrainRow
from trainstep.rows.records import read_records
from trainstep.train.data import TokenData
from trainstep.train.history import DRAWN, _scheme, history
from trainstep.train.loop import Outcome

OLD = {"loss": 2.0, "validation_loss": None, "learning_rate": 1e-3, "gradient_norm": 1.0, "step_ms": 10.0,
       "tokens_per_s": 100.0, "utilisation": None, "tokens": 1, "world_size": 1}  # fmt: skip


def write(folder, made):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Nothing but the metrics of a run that was killed after update 10, went on from 8, and was killed after 11."""
    out = tmp_path_factory.mktemp("history") / "run"
    alone(config(eval_every=3, log_every=2), out, stop_after=11)
    assert names(out)[-1] == "step-00000011"
    shutil.rmtree(out / "checkpoints" / names(out)[-1])
    shutil.rmtree(out / "checkpoints" / names(out)[-1])
    alone(config(eval_every=3, log_every=2, step={"batch": 4}), out, stop_after=11)
    folder = tmp_path_factory.mktemp("metrics")
    shutil.copy(out / "metrics.jsonl", folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "lo')
    return folder


def test_a_killed_run_is_told_from_its_metrics_alone(killed):
    row = history(killed)
    assert isinstance(row, TrainRow)
    starts = row.series["start_step"]
    assert (row.done, row.starts, row.trained_again) == (11, 2, 12 - starts[1])
    assert (row.workload, row.scheme, row.world_size, row.batch) == ("small test", "single", 1, 4), "the last start's"
    assert row.series["validation_step"] == [3, 6, 9]
    assert row.series["saved_step"][0] == 4
    assert row.series["loss"] == [each["loss"] for each in rows_of(killed)]
    assert row.environment["torch"]
    assert 0 < row.validation_share < 1
    assert 0 < row.checkpoint_share < 1
    assert row.n == 11 - starts[1] + 1, "speed is the last start's"


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:11]]


def test_what_was_made_again_is_in_the_first_row_of_a_start(killed):
    begun = [row for row in rows_of(killed) if row["since_start"] == 1]
    assert [row["trained_again"] for row in begun] == [0, 12 - begun[1]["step"]]
    assert all("start" not in row for row in rows_of(killed) if row["since_start"] > 1)
    assert begun[1]["step"] in (5, 9)


def test_the_record_of_a_finished_run_has_the_same(tmp_path):
    alone(config(), tmp_path / "run")
    (record,) = read_records(tmp_path / "run" / "results.jsonl")
    told = history(tmp_path / "run")
    (same,) = compare([record], [record])
    assert (same.old_ms, same.losses.difference, same.tokens) == (pytest.approx(told.step_ms, rel=1e-4), 0.0, None)
    assert record.case == told.case
    assert record.values["done"] == told.done == 12
    assert record.values["last_loss"] == pytest.approx(told.last_loss, rel=1e-4)
    (tmp_path / "run" / "results.jsonl").unlink()
    assert history(tmp_path / "run").values == told.values


def test_metrics_of_an_earlier_version(tmp_path):
    row = history(write(tmp_path / "older", [OLD | {"step": n, "since_start": n} for n in range(1, 4)]))
    assert (row.workload, row.done, row.starts, row.scheme) == ("older", 3, 1, None)
    assert row.series["ranks_own_ms"] == []


def test_a_long_run_is_drawn_in_points_of_several_updates(tmp_path):
    made = [OLD | {"step": n, "since_start": n, "loss": float(n), "step_ms": 1.0 + 9 * (n % 3 == 0)}
            for n in range(1, 1201)]  # fmt: skip
    row = history(write(tmp_path, made))
    assert len(row.series["step"]) == DRAWN
    assert row.series["step"][:2] == [3, 6]
    assert row.series["loss"][:2] == [2.0, 5.0], "means"
    assert set(row.series["step_ms"]) == {1.0}, "medians"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"step": 1}, "rows that are not a training run's"),
        (OLD | {"step": 1, "since_start": 1, "loss": "low"}, "rows that are not a training run's"),
        (OLD | {"step": 1, "since_start": 1, "loss": float("nan")}, "loss is nan; expected a finite number"),
        (OLD | {"step": 1, "since_start": 1, "start": 7}, "rows that are not a training run's"),
        (OLD | {"step": 1, "since_start": 1, "start": {"case": {"colour": 1}, "environment": {}}}, "not a training"),
        (OLD | {"step": 1, "since_start": 1, "ranks_own_ms": [[]]}, "not a training run's"),
    ],
)
def test_rows_of_something_else(tmp_path, row, message):
    with pytest.raises(UsageError, match=message):
        history(write(tmp_path, [row]))


def test_no_run_and_a_run_that_has_not_begun(tmp_path):
    with pytest.raises(UsageError, match=r"metrics\.jsonl is not there; give the --out of a run"):
        history(tmp_path)
    with pytest.raises(UsageError, match="has made no update yet"):
        history(write(tmp_path, []))


def _late(process, run, out):
    """A rank whose batches take 5 ms more."""
    draw = TokenData.training_parts

    def slowly(self, *where):
        time.sleep(0.005)
        return draw(self, *where)

    if process.rank == 1:
        TokenData.training_parts = slowly
    try:
        on_rank(process, run, out)
    finally:
        TokenData.training_parts = draw


@pytest.mark.distributed
def test_each_ranks_own_time_is_told_every_so_many_updates(two, tmp_path):
    for scheme in ("ddp", "sharded-optimizer", "fsdp"):
        two.run(_late, config(scheme=scheme, log_every=4), tmp_path / scheme)
        told = [row for row in rows(tmp_path / scheme) if "ranks_data_ms" in row]
        assert [row["step"] for row in told] == [4, 8, 12]
        assert all(row["ranks_data_ms"][1] >= 5 for row in told)
        own = [row["ranks_own_ms"][1] > row["ranks_data_ms"][1] for row in told if "ranks_own_ms" in row]
        assert own == ([] if scheme == "fsdp" else [True] * 3), "FSDP's ranks wait for each other all along"
        found = history(tmp_path / scheme).series
        assert (len(found["ranks_own_ms"]), len(found["ranks_data_ms"])) == (0 if scheme == "fsdp" else 2, 2)


def leave_with(words):
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code


def test_the_command_draws_runs_and_results(killed, tmp_path, capsys):
    assert leave_with(["report", str(killed)]) == 0
    assert "small test" in (killed / "report.html").read_text()
    assert leave_with(["report", str(killed), str(killed), "--out", str(tmp_path / "both")]) == 0
    assert "run 2" in (tmp_path / "both" / "report.html").read_text()
    assert leave_with(["report", str(killed), str(killed)]) == 2
    assert "say where with --out" in capsys.readouterr().err
    assert leave_with(["report", str(tmp_path)]) == 2
    assert f"cannot read results from {tmp_path / 'results.jsonl'}" in capsys.readouterr().err


def test_train_leaves_a_page(tmp_path, capsys):
    words = ["train", "--workload", "tests.train.own_models:counting", "--steps", "3", "--no-tensorboard",
             "--device", "cpu", "--out", str(tmp_path / "run")]  # fmt: skip
    assert leave_with(words) == 0
    assert "report.html has its curves" in capsys.readouterr().out
    assert "loss after update 3 of 3" in (tmp_path / "run" / "report.html").read_text()


def test_a_stopped_run_says_what_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainstep.train.loop.train", lambda *given, **more: Outcome(7, False, signal.SIGINT))
    words = ["train", "--learning-rate", "2e-05", "--steps", "9", "--out", str(tmp_path / "a run")]
    assert leave_with(words) == 130
    assert capsys.readouterr().out.splitlines()[-1].strip() == shlex.join(["trainstep", *words])


def test_starts_say_their_scheme_as_it_was_set():
    cases = [{"scheme": "hsdp", "replicas": 2, "blocks_per_group": 2}, {"scheme": "fsdp"}, {"scheme": "later"}, {}]
    assert [_scheme(case) for case in cases] == ["hsdp-2 by 2 blocks", "fsdp", "later", ""]
