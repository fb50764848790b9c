"""Configurations that cannot be trained say so before anything is built."""

import math

import pytest

from tests.train.runs import config
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.checkpointing.policies import Policy
from trainstep.commands.train import Train
from trainstep.train.config import MAY_CHANGE, TrainConfig, differences


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0; expected 1 or more"),
        ({"keep": 0}, "keep is 0"),
        ({"replicas": -1}, "replicas is -1; expected 0 or more"),
        ({"blocks_per_group": 0}, "blocks_per_group is 0; expected 1 or more"),
        ({"global_batch": -4}, "global_batch is -4"),
        ({"warmup": 20.0}, "warmup is 20.0; expected a fraction from 0 to 1"),
        ({"min_learning_rate": 1.5}, "expected a fraction from 0 to 1"),
        ({"clip_norm": 0.0}, "or inf for no clipping"),
        ({"clip_norm": math.nan}, "or inf for no clipping"),
        ({"validation_fraction": 0.0}, "between 0 and 1"),
    ],
)
def test_values_out_of_range(changes, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize(
    ("run", "ranks", "error", "message"),
    [
        (config(global_batch=8), 3, UsageError, "global_batch 8 does not divide into passes of 6 sequences: 3 ranks"),
        (config(global_batch=9), 1, UsageError, "passes of 2 sequences: 1 rank × batch 2; choose --global-batch among"),
        (config(scheme="single"), 2, UsageError, "would train 2 models"),
        (config(model={"max_context": 16}), 1, UsageError, "context 32 is longer than the model's max_context 16"),
        (config(step={"precision": "fp16"}), 1, UnsupportedError, "does not take fp16: .*; use --precision bf16"),
        (config(scheme="hsdp"), 2, UnsupportedError, "2 ranks cannot be laid out as replicas"),
        (config(scheme="hsdp", replicas=3), 4, UnsupportedError, "4 ranks do not divide into 3 replicas"),
        (config(scheme="fsdp", replicas=2), 4, UsageError, "replicas is 2, and fsdp makes none; use --scheme hsdp"),
        (config(blocks_per_group=2), 4, UsageError, "is 2, and ddp gathers no blocks; use --scheme fsdp"),
        (config(scheme="sharded-optimizer", blocks_per_group=2), 4, UsageError, "sharded-optimizer gathers no blocks"),
        (config(scheme="fsdp", blocks_per_group=3), 4, UsageError, "blocks_per_group is 3; the model has 2 blocks"),
    ],
)
def test_what_does_not_fit_together(run, ranks, error, message):
    with pytest.raises(error, match=message) as caught:
        run.check(ranks)
    assert caught.type is error


def test_a_policy_that_updates_in_backward_is_refused_before_anything_is_built(tmp_path):
    Policy(update_in_backward=True).save(tmp_path / "policy.json")
    step = {"checkpointing": f"@{tmp_path / 'policy.json'}"}
    config(step=step, clip_norm=math.inf, global_batch=2).check(1)
    for ranks, changes, why in (
        (1, {"clip_norm": 1.0, "global_batch": 2}, "clip_norm 1 needs all of them"),
        (1, {"clip_norm": math.inf, "global_batch": 4}, "an update of 2 passes adds them up"),
        (2, {"clip_norm": math.inf, "global_batch": 4}, "2 ranks average them"),
    ):
        with pytest.raises(UsageError, match=f"updates in backward, .* {why}; update after backward"):
            config(step=step, **changes).check(ranks)


def test_replicas_over_hosts_and_blocks_that_are_gathered_together():
    config(scheme="hsdp").check(2, hosts=2)
    for scheme in ("fsdp", "hsdp"):
        together = config(scheme=scheme, blocks_per_group=2)
        together.check(4)
        assert together.scheme(4).blocks_per_group == 2


def test_auto_stands_for_ddp_on_several_ranks():
    assert [config().scheme(ranks).name for ranks in (1, 2, 8)] == ["single", "ddp", "ddp"]
    assert config(scheme="fsdp").scheme(1).name == "fsdp"
    assert [config(scheme="hsdp").scheme(*on).replicas for on in ((4,), (16, 4), (2,))] == [2, 4, None]
    assert config(scheme="hsdp", replicas=8).scheme(16, 4).replicas == 8
    assert config(scheme="ddp", replicas=8).scheme(16, 4).replicas is None
    assert [config(global_batch=8).passes(ranks) for ranks in (1, 2, 4)] == [4, 2, 1]
    assert config(global_batch=8).tokens_per_update == 8 * 32


def test_validations_and_checkpoints_come_at_their_intervals_and_at_the_end():
    train = config(steps=11, eval_every=4, save_every=5).train
    assert [step for step in range(1, 12) if train.validates_after(step)] == [4, 8, 11]
    assert [step for step in range(1, 12) if train.saves_after(step)] == [5, 10, 11]


def test_the_identity_is_what_the_curve_depends_on():
    plain = config().identity({"tokens": 5})
    assert all(name.split(".")[0] in ("model", "step", "train", "data") for name in plain)
    assert not MAY_CHANGE & plain.keys()
    same = config(step={"batch": 4, "attention": "sdpa"}, scheme="fsdp", save_every=1, keep=9).identity({"tokens": 5})
    assert differences(same, plain) == []
    other = config(step={"learning_rate": 1.0}, model={"d_ff": 96}).identity({"tokens": 6})
    assert differences(other, plain) == ["model.d_ff: 64 → 96", "step.learning_rate: 0.003 → 1.0", "data.tokens: 5 → 6"]


def test_every_field_that_may_change_exists():
    run = config()
    for name in MAY_CHANGE:
        room, _, field = name.partition(".")
        assert hasattr(getattr(run, room), field), name


def test_a_toml_file_describes_a_whole_run(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nd_ff = 64\n[step]\ncontext = 32\n[train]\nsteps = 7\ntensorboard = false\n")
    run = Train(config=path).run_config()
    assert (run.model.d_ff, run.step.context) == (64, 32)
    assert (run.train.steps, run.train.tensorboard) == (7, False)
    path.write_text("[train]\nsteps = 7.5\n")
    with pytest.raises(UsageError, match=r"run.toml \[train\] steps is 7.5; expected a value of type int"):
        Train(config=path).run_config()
    path.write_text("[train]\nstep = 7\n")
    with pytest.raises(UsageError, match="unknown key 'step'"):
        Train(config=path).run_config()


def learning_rate(step, *, peak, warmup, steps, floor):
    """Of a run with so many updates of warm-up."""
    run = config(step={"learning_rate": peak}, warmup=warmup / steps, steps=steps, min_learning_rate=floor)
    return run.learning_rate(step)


def test_warm_up_then_half_a_cosine():
    rates = [learning_rate(step, peak=2.0, warmup=4, steps=12, floor=0.25) for step in range(1, 13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[7] == pytest.approx(2.0 * (0.25 + 0.75 / 2)), "half-way between the peak and the floor"
    assert rates[-1] == pytest.approx(0.5)
    for done in range(1, 9):
        expected = 0.5 + 1.5 * math.cos(math.pi * done / 16) ** 2  # (1 + cos x) / 2 = cos²(x / 2)
        assert rates[3 + done] == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_and_with_nothing_else():
    assert learning_rate(1, peak=1.0, warmup=0, steps=1, floor=0.1) == pytest.approx(0.1)
    assert learning_rate(5, peak=1.0, warmup=5, steps=5, floor=0.0) == 1.0
    assert learning_rate(10, peak=1.0, warmup=0, steps=10, floor=0.0) == pytest.approx(0, abs=1e-15)


def test_an_update_beyond_the_end_is_a_fault_of_ours():
    with pytest.raises(AssertionError, match="update 11 of 10"):
        learning_rate(11, peak=1.0, warmup=0, steps=10, floor=0.0)
