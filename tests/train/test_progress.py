"""What the terminal shows: a line now and then on the first rank, nothing on others."""

import io
from pathlib import Path

from rich.console import Console

from tests.train.runs import MODEL, config
from trainstep.train.checkpoints import Checkpoint
from trainstep.train.folder import Start
from trainstep.train.progress import Show, as_beginning, as_summary

ROW = {"loss": 2.5, "learning_rate": 3e-4, "gradient_norm": 1.25, "tokens_per_s": 12345.6, "utilisation": None,
       "validation_loss": None}  # fmt: skip


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
    assert [line.split()[1] for line in lines] == ["1", "10", "15", "20", "30"]
    assert lines[0].endswith("loss 2.5000  learning rate 3.00e-04  gradient norm 1.250  12,346 tokens/s")
    assert lines[2].endswith("utilisation 41.5 %  validation loss 2.7500")


def test_on_a_terminal_there_is_a_bar_too():
    assert "30/30" in shown([ROW | {"step": step} for step in range(1, 31)], force_terminal=True)


def test_other_ranks_are_silent(capsys):
    show = Show(None, log_every=1)
    with show.progress(3, 0):
        show.update(ROW | {"step": 1})
        show.line("nothing")
    assert capsys.readouterr().out == ""


def test_the_first_line_says_what_is_trained_how_and_from_where():
    older = Checkpoint(Path("runs/a/checkpoints/step-00000004"), 4, {"world_size": 1})

    def first(start):
        return as_beginning(start, config(), 2, Path("runs/a"))

    what = (
        f"small test: {MODEL.num_parameters:,} parameters, 12 updates of 8 × 32 tokens (2 ranks × 2 passes × batch 2), "
        "ddp, fp32 → runs/a"
    )
    assert first(Start(is_new=True, checkpoint=None)) == what
    assert first(Start(is_new=False, checkpoint=None)).splitlines() == [
        what,
        "the run was begun before, but has no checkpoint yet: from the first update again",
    ]
    assert first(Start(is_new=False, checkpoint=older, aside=("aside-1-step-00000008",))).splitlines() == [
        what,
        "resumed from step-00000004, written by 1 rank",
        "set aside: aside-1-step-00000008",
    ]
    assert first(Start(is_new=False, checkpoint=older, is_finished=True)) == (
        "the run in runs/a is finished: all 12 updates are made; nothing to do"
    )


def test_a_summary_leaves_out_what_was_not_measured():
    values = {"validation_loss": 2.0, "n": 7, "step_ms": 123.456, "tokens_per_s": 5000.0, "utilisation": None}
    assert as_summary(values | {"peak_gib": None}) == (
        "validation loss 2.0000  median of 7 updates: 123.5 ms, 5,000 tokens/s"
    )
    assert (
        as_summary({"validation_loss": 2.0, "n": 0, "utilisation": None, "peak_gib": None}) == "validation loss 2.0000"
    )
    assert as_summary(values | {"utilisation": 0.4, "peak_gib": 12.3}).endswith(
        "utilisation 40.0 %  peak 12.3 GiB on a rank"
    )
