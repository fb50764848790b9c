"""Rows of steps: facts of a workload, measured steps, the ladder, what the device reaches, dtypes."""

from __future__ import annotations

from trainstep.rows.row import GpuState, GradientErrors, Peaks, Row, Speedup, StepSettings, Timed, setting


class WorkloadRow(StepSettings, kind="workload"):
    """Facts about a workload before anything runs. FLOPs are those of the mathematics."""

    parameters: int | None = None
    trainable_parameters: int | None = None
    parameters_gib: float | None = None
    blocks: int | None = None
    tokens: int | None = None  # per step
    forward_tflop: float | None = None
    projections_tflop: float | None = None
    feed_forward_tflop: float | None = None
    attention_tflop: float | None = None
    head_tflop: float | None = None
    flops_counted: str | None = None  # what the counts leave out


class MeasuredStep(StepSettings, GpuState, Peaks, Timed):
    """Times of one run of steps: the whole step ("step", by the host's clock), each phase, each phase's time to issue
    ("forward_issue" …) and the host's wait ("wait")."""

    first_step_ms: float | None = None
    tokens_per_s: float | None = None
    model_tflop: float | None = None  # FLOPs of the mathematics per step
    flops_uncounted: tuple[str, ...] | None = None  # operators that are not in these, and may be products; no rate then
    achieved_tflops: float | None = None
    utilisation: float | None = None  # of the device's peak rate in this precision, by its datasheet
    optimizer_state_gib: float | None = None


class Checked(GradientErrors):
    """Errors of a step relative to the plain one, beside what is allowed, at two places at most."""

    loss_error: float | None = None
    error_budget: float | None = None  # what is allowed of `gradient_error`
    not_in_float32: str | None = None  # why there is no such step
    update_error: float | None = None  # of updates of the optimizer from equal gradients
    update_allowed: float | None = None
    compared: str | None = None  # how the gradients were compared where not as they are, such as with dropout off
    not_checked: str | None = None  # why nothing says whether the step is right
    batches: str | None = None  # on which it was compared, where every build gets others
    reference: str | None = None  # what it was compared with where that is not the plain step, and why
    unseen_rows: str | None = None  # rows of parameters that got no gradient in any checked pass


class StepRow(MeasuredStep, Checked, kind="step"):
    """A case of `bench step`. Samples: milliseconds by phase, and `training_loss` of every step, warm-up included.

    Beside the phases there is "batch": the host's time to make the next batch ready, which is outside of the step. A
    sustained step has none, as its time has it inside.
    """

    mode: str | None = setting(None)
    warmup: int | None = setting(None)
    steps: int | None = setting(None)
    repeat: int | None = setting(None)  # which pass over the grid, from 0
    timing: str | None = setting(None)  # sustained: no synchronisation between steps; None: one around each
    run: int | None = setting(None)  # which process of those that measured the same case; None where there was one


class RatioRow(StepSettings, Speedup, kind="ratio"):
    """Two arms of `bench ab`, each several runs: the speed-up is old over new, between runs. Samples: the runs' medians
    of the step in ms, old and new."""

    flag: str = setting()  # what the arms differ in; `nothing` where they are equal
    old: str = setting()  # its value in each
    new: str = setting()
    mode: str | None = setting(None)
    warmup: int | None = setting(None)
    steps: int | None = setting(None)
    old_ms: float | None = None  # medians of the runs' medians
    new_ms: float | None = None
    verdict: str | None = None  # faster, slower or inconclusive
    runs: int | None = None  # of each arm
    run_deviation: float | None = None  # relative standard deviation of the runs' medians within an arm
    smallest_found: float | None = None  # the relative difference that these runs tell from none 9 times of 10


ON_TOP = ", on the top"
"""Ends the name of a change that was not accepted at first and is tried again."""
AT_ONCE = " + "
"""Between the names of changes that are tried together."""
BASELINE, FINAL, PATCHED = "baseline", "final configuration", "patched script"
"""Rows of a ladder that are no change: what it begins with, all that was accepted against that, and the diff of it."""
FIRST_THAT_FITS = "first that fits"
"""The verdict on a ladder's first step that has memory enough, where the baseline has not."""


class ChangeRow(MeasuredStep, Checked, Speedup, kind="change"):
    """Result of a ladder for a change, or for several at once: whether it is right, and its speed-up over the first
    that ran.

    Of a workload's step, samples are phases, and "step_before" of what was accepted before. Of a script, which is run
    anew for each, a run's step is its total over its steps, and "step" the median of these over the runs; samples are
    all steps ("step"), the runs' own ("runs"), and `training_loss` of one run.
    """

    change: str = setting()
    code: str | None = None  # what a reader writes for it, and where
    where: str | None = None
    answers: tuple[str, ...] | None = None  # ids of findings whose action it is
    verdict: str | None = None
    """baseline, first that fits, faster, slower, inconclusive, wrong, not tried, not judged, not
    reproducible, or the status of what did not run."""
    accepted: bool = False  # whether later changes were built on it
    gain: float | None = None  # over what was accepted before
    gain_low: float | None = None
    gain_high: float | None = None
    between_runs: bool = False  # whether ratios are between runs of a script, each a process; else within one

    # Of a workload's step.
    check_s: float | None = None  # seconds of the check, compilation included
    attempts: int | None = None  # how often it was timed, or took turns; all samples count
    in_turns: bool | None = None  # whether its gain is over pairs of steps taken in turns; None for a first one

    # Of a script.
    losses_error: float | None = None  # of the loss of the update at which most of what is allowed is used, relative
    losses_allowed: float | None = None  # None where rounding alone would move it by as much as it is
    moved_error: float | None = None  # of how far all weights have moved at the end, relative
    moved_allowed: float | None = None
    shown_error: float | None = None  # of the worst buffer, copy of the weights or output in evaluation
    shown_allowed: float | None = None
    runs: int | None = None  # that were timed
    updates: int | None = None  # of the run that was compared: of what comes after them nothing is known
    is_whole: bool | None = None  # whether those are all that the script takes
    in_first_epoch: bool | None = None  # whether it was stopped before its main loader was begun a second time

    # Of the final configuration: what was measured again at the ladder's end, which ratios to 1 say did not drift.
    first: str | None = None  # what ran first, and the last that was accepted
    first_ms: float | None = None
    first_again_ms: float | None = None
    first_drift: float | None = None  # again over at first; the interval should contain 1
    first_drift_low: float | None = None
    first_drift_high: float | None = None
    top: str | None = None
    top_ms: float | None = None
    top_again_ms: float | None = None
    top_drift: float | None = None
    top_drift_low: float | None = None
    top_drift_high: float | None = None

    @property
    def names(self) -> list[str]:
        """The changes that it tries, wherever on the ladder."""
        return self.change.removesuffix(ON_TOP).split(AT_ONCE)

    @property
    def lines(self) -> str:
        """Code to write for the change, with where."""
        return f"{self.code} ({self.where})" if self.where else self.code or ""


class CeilingRow(Row, kind="ceiling"):
    """Rate that the device reaches: a large matrix product in one precision, or a large copy."""

    operation: str = setting()  # matmul, copy, or all where none could be measured
    precision: str | None = setting(None)  # of a product
    tflops: float | None = None
    gb_s: float | None = None  # read and written


class DtypeRow(StepSettings, kind="dtype"):
    """The dtypes that a module had in a step; alike modules are one row."""

    module: str = setting()
    class_name: str | None = None
    modules: int | None = None  # how many are alike
    parameters: tuple[str, ...] | None = None
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    gradients: tuple[str, ...] | None = None
    cuda_outputs: tuple[str, ...] | None = None  # by autocast's rules for CUDA, where the step ran on a CPU
    not_computed: str | None = None  # in the row of forward's result: why no row of the step has these
