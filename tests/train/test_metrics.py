"""metrics.jsonl has every update once, whatever happened."""

import json

from trainstep.train.metrics import MetricsWriter, read_metrics


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
