"""`trainstep info` and `trainstep tune`: what this machine is, and its own tiles and choices for attention."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from tyro.conf import FlagCreatePairsOff, Positional

from trainstep.base.errors import UsageError, say
from trainstep.commands.options import Common, commas
from trainstep.commands.output import console_for_output


@dataclass(frozen=True, kw_only=True)
class Info(Common):
    """Print the environment, for bug reports."""

    has_summary = False

    def run(self) -> int:
        from trainstep.measure.environment import describe, gpu_state
        from trainstep.step.workload import resolve_device

        device = resolve_device("auto")
        for name, value in {**describe(device), **gpu_state(device)}.items():
            say(f"{name:18} {value}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Tune(Common):
    """Measure tile sizes and the fastest implementation per shape on this GPU, and write them to your cache folder."""

    has_summary = False

    what: Positional[Literal["attention"]] = "attention"
    """Name of the operation to tune."""
    part: commas(Literal["tiles", "choice"]) = ("tiles", "choice")  # type: ignore[valid-type]
    """tiles: the configurations of our kernels; choice: the implementation that impl=auto takes."""
    head_dim: commas(int) = (16, 32, 64, 128, 256)  # type: ignore[valid-type]
    """Features per head to measure."""
    dtype: commas(Literal["bf16", "fp16", "fp32", "tf32"]) = ("bf16", "fp32", "tf32")  # type: ignore[valid-type]
    """Types to measure. 16-bit types share their tiles; tf32 is float32 on TF32 units, for tiles only."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Measure and print, and write nothing."""

    def run(self) -> int:
        from trainstep.attention.tune import Measurement, tune_choice, tune_tiles
        from trainstep.attention.tuned import CHOICES, HOPPER_TILES, TILES
        from trainstep.step.casting import DTYPES

        chosen = [name for name in self.dtype if name != "tf32"]
        if "tiles" not in self.part and "tf32" in self.given().get("dtype", ()):
            raise UsageError(
                "--part choice measures nothing of --dtype tf32: tf32 has tiles only; name fp32, or --part tiles"
            )
        say = functools.partial(console_for_output().print, markup=False, highlight=False)

        def show(done: Measurement) -> None:
            what = f"{done.kernel} {done.dtype} head_dim {done.head_dim} causal {done.is_causal} {done.tile}: "
            say(what + (done.error if done.time_ms is None else f"{done.time_ms:.4g} ms"))

        save, written = not self.dry_run, []
        if "tiles" in self.part:
            tune_tiles(head_dims=self.head_dim, dtypes=self.dtype, progress=show, save=save)
            written += [TILES.user_file(), HOPPER_TILES.user_file()]
        if "choice" in self.part:
            dtypes = [DTYPES[name] for name in chosen]
            tune_choice(head_dims=self.head_dim, dtypes=dtypes, progress=say, save=save)
            written.append(CHOICES.user_file())
        if save:
            say(f"written: {', '.join(map(str, written))}", soft_wrap=True)
        return 0
