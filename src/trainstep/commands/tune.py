"""`trainstep tune attention`: measure this GPU for our kernels and for `impl="auto"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import FlagCreatePairsOff, Positional

from trainstep.commands.options import Common, commas
from trainstep.commands.output import console_for_output
from trainstep.errors import UsageError

Dtype = Literal["bf16", "fp16", "fp32", "tf32"]
Part = Literal["tiles", "choice"]


@dataclass(frozen=True, kw_only=True)
class Tune(Common):
    """Measure tile sizes and the fastest implementation per shape on this GPU, and write them to your cache folder."""

    what: Positional[Literal["attention"]] = "attention"
    """What to tune."""
    part: commas(Part) = ("tiles", "choice")  # type: ignore[valid-type]
    """tiles: the configurations of our kernels; choice: what impl=auto stands for."""
    head_dim: commas(int) = (16, 32, 64, 128, 256)  # type: ignore[valid-type]
    """Features per head to measure."""
    dtype: commas(Dtype) = ("bf16", "fp32", "tf32")  # type: ignore[valid-type]
    """Types to measure. 16-bit types share their tiles; tf32 is float32 on TF32 units, for tiles only."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Measure and print, and write nothing."""

    def run(self) -> int:
        from trainstep.attention.tune import tune_choice, tune_tiles
        from trainstep.attention.tuned import CHOICES, HOPPER_TILES, TILES
        from trainstep.casting import DTYPES

        chosen = [name for name in self.dtype if name != "tf32"]
        if "tiles" not in self.part and not chosen:
            raise UsageError(
                "--part choice --dtype tf32 measures nothing: tf32 has tiles only; add fp32, or --part tiles"
            )
        console = console_for_output()
        written = []
        if "tiles" in self.part:
            tune_tiles(
                head_dims=self.head_dim,
                dtypes=self.dtype,
                progress=lambda done: console.print(
                    f"{done.kernel} {done.dtype} head_dim {done.head_dim} causal {done.is_causal} {done.tile}: "
                    + (done.error if done.time_ms is None else f"{done.time_ms:.4g} ms"),
                    markup=False,
                    highlight=False,
                ),
                save=not self.dry_run,
            )
            written += [TILES.user_file(), HOPPER_TILES.user_file()]
        if "choice" in self.part:
            tune_choice(
                head_dims=self.head_dim,
                dtypes=[DTYPES[name] for name in chosen],
                progress=lambda line: console.print(line, markup=False, highlight=False),
                save=not self.dry_run,
            )
            written.append(CHOICES.user_file())
        if not self.dry_run:
            console.print(f"written: {', '.join(map(str, written))}", markup=False, highlight=False, soft_wrap=True)
        return 0
