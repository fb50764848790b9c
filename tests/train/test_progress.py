"""What the terminal shows: a line now and then on the first rank, nothing on others."""

import io

from rich.console import Console

from trainstep.train.progress import Show, as_summary

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
