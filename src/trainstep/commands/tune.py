"""`trainstep tune attention`: measure this GPU and rewrite the tables that our kernels and `impl="auto"` look up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import FlagCreatePairsOff, Positional

from trainstep.commands.grids import commas
from trainstep.commands.options import Common
from trainstep.commands.output import console_for_output
from trainstep.errors import UsageError

Dtype = Literal["bf16", "fp16", "fp32", "tf32"]
Part = Literal["tiles", "choice"]


@dataclass(frozen=True, kw_only=True)
class Tune(Common):
    """Measure this GPU and rewrite the tables of tile sizes and of the fastest implementation per shape."""

    what: Positional[Literal["attention"]] = "attention"
    """What to tune."""
    part: commas(Part) = ("tiles", "choice")  # type: ignore[valid-type]
    """tiles: the configurations of our kernels; choice: what impl=auto stands for."""
    head_dim: commas(int) = (16, 32, 64, 128, 256)  # type: ignore[valid-type]
    """Features per head to measure."""
    dtype: commas(Dtype) = ("bf16", "fp32", "tf32")  # type: ignore[valid-type]
    """Types to measure. 16-bit types share their tiles; tf32 is float32 on TF32 units, for tiles only."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Measure and print, and leave the tables as they are."""

    def run(self) -> int:
        """Measure, print and write."""
        from trainstep.attention import measure_choice
        from trainstep.attention.triton import tune
        from trainstep.casting import DTYPES

        chosen = [name for name in self.dtype if name != "tf32"]
        if "tiles" not in self.part and not chosen:
            raise UsageError(
                "--part choice --dtype tf32 measures nothing: tf32 has tiles only; add fp32, or --part tiles"
            )
        console = console_for_output()
        if "tiles" in self.part:
            tune.tune(
                head_dims=self.head_dim,
                dtypes=self.dtype,
                progress=lambda done: console.print(
                    f"{done.kernel} {done.dtype} head_dim {done.head_dim} causal {done.is_causal} {done.tile}: "
                    + (done.error if done.time_ms is None else f"{done.time_ms:.4g} ms"),
                    markup=False,
                    highlight=False,
                ),
                write=None if self.dry_run else tune.TABLES,
            )
        if "choice" in self.part:
            measure_choice.measure(
                head_dims=self.head_dim,
                dtypes=[DTYPES[name] for name in chosen],
                progress=lambda line: console.print(line, markup=False, highlight=False),
                write=None if self.dry_run else measure_choice.TABLE,
            )
        return 0
