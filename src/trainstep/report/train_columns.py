"""What the table of training runs shows: what was trained how, how far it came, and how fast."""

from __future__ import annotations

from collections.abc import Mapping

from trainstep.report.columns import OUTCOME, SETTINGS, Column, case_column, count_column, median_column, value_column
from trainstep.report.numbers import number

TRAIN_COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "train": (
        "Training runs: losses in nats per token; speed is the median over updates after the first ones",
        (
            *SETTINGS,
            case_column("ranks", "world_size"),
            case_column("global batch", "global_batch"),
            case_column("updates", "steps"),
            Column("scheme", lambda row: number(row.case["scheme"])),
            Column("n", lambda row: number(row.values.get("n")), setting=True),
            value_column("first loss", "first_loss", digits=5),
            value_column("last loss", "last_loss", digits=5),
            value_column("validation loss", "validation_loss", digits=5),
            median_column("update (ms) [95 %]", "step"),
            count_column("tokens/s", "tokens_per_s"),
            value_column("utilisation (%)", "utilisation", 100),
            value_column("peak (GiB)", "peak_gib"),
            OUTCOME,
        ),
    ),
}
"""For a run's record: its table's caption and columns."""
