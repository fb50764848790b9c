"""Every scheme makes the curve of one process, also where it goes on at another number of ranks."""

import pytest

from tests.train.runs import alone, config, far_apart, losses, names, on_rank, rows, until
from tests.workers import WorkerError
from trainstep.base.errors import UsageError

pytestmark = pytest.mark.distributed

SHORT = {"steps": 24, "warmup": 0.1, "eval_every": 12, "save_every": 24}


def _unlike(process, out):
    run = config(step={"learning_rate": 1e-2, "seed": 3}) if process.rank == 1 else config()
    with pytest.raises(UsageError) as error:
        on_rank(process, run, out)
    return str(error.value)


def test_ranks_that_are_started_unlike_each_other_are_told_in_what(two, tmp_path):
    """On several hosts the command is typed several times; ranks with other learning rates trained on in silence."""
    for message in two.run(_unlike, tmp_path / "run"):
        assert "rank 1 was started otherwise than rank 0" in message
        assert "step.learning_rate: 0.003 → 0.01; step.seed: 0 → 3" in message
    assert not (tmp_path / "run").exists()


def test_the_curve_of_one_process_goes_on_from_two_ranks_to_one_to_four(two, four, tmp_path):
    alone(config(**SHORT), tmp_path / "expected")
    chains = {
        "fsdp": ("fsdp", "single", "ddp"),
        "sharded-optimizer": ("sharded-optimizer", "sharded-optimizer", "sharded-optimizer"),
        "hsdp": ("hsdp", "single", "hsdp"),  # as 2×1, and as 2×2
    }
    for name, (first, second, third) in chains.items():
        out = tmp_path / name
        together = 1 if first == "sharded-optimizer" else 2
        run = config(scheme=first, replicas=2 * (first == "hsdp"), blocks_per_group=together, **SHORT)
        assert two.run(until, run, out, 8) == [8, 8]
        assert names(out) == ["step-00000008"]
        assert alone(config(scheme=second, **SHORT), out, stop_after=16).step == 16
        four.run(on_rank, config(scheme=third, **SHORT), out)
        assert [row["world_size"] for row in rows(out)] == 8 * [2] + 8 * [1] + 8 * [4]
        assert far_apart(losses(tmp_path / "expected"), losses(out)) < 1e-5
        for ours, theirs in zip(rows(tmp_path / "expected"), rows(out), strict=True):
            assert ours["learning_rate"] == theirs["learning_rate"]
            assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
            if ours["validation_loss"] is not None:
                assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(("sharded-optimizer", "single", "sharded-optimizer"), marks=pytest.mark.thorough),
        ("fsdp", "sharded-optimizer", "hsdp"),
        pytest.param(("sharded-optimizer", "fsdp", "ddp"), marks=pytest.mark.thorough),
    ],
    ids="-".join,
)
def test_slices_are_read_by_name_and_names_in_slices(two, four, tmp_path, chain):
    """On two ranks, one and four, or two, four and two: the slices of each number lie in other rows."""
    first, second, third = chain
    out, run = tmp_path / "run", lambda scheme: config(scheme=scheme, replicas=2 * (scheme == "hsdp"), **SHORT)
    alone(config(**SHORT), tmp_path / "expected")
    two.run(until, run(first), out, 8)
    if second == "single":
        alone(run(second), out, stop_after=16)
    else:
        four.run(until, run(second), out, 16)
    (four if second == "single" else two).run(on_rank, run(third), out)
    assert far_apart(losses(tmp_path / "expected"), losses(out)) < 1e-5


def _odd(process, out, scheme, stop_after):
    """A model whose parameters do not divide by the ranks, and one rank's rows are none."""
    on_rank(process, config(scheme=scheme, model={"num_layers": 1, "d_ff": 33}, **SHORT), out, stop_after=stop_after)


def test_parameters_that_do_not_divide_are_read_in_the_other_form(two, tmp_path):
    shape = {"num_layers": 1, "d_ff": 33}
    alone(config(model=shape, **SHORT), tmp_path / "expected")
    for scheme, stop in (("sharded-optimizer", 8), ("fsdp", 16), ("sharded-optimizer", None)):
        two.run(_odd, tmp_path / "run", scheme, stop)
    assert far_apart(losses(tmp_path / "expected"), losses(tmp_path / "run")) < 1e-5


def test_a_mistake_is_that_of_every_rank(two, tmp_path):
    with pytest.raises(WorkerError) as caught:
        two.run(on_rank, config(global_batch=6), tmp_path / "run")
    assert set(caught.value.failures) == {0, 1}
    assert all("does not divide into passes of 4" in each for each in caught.value.failures.values())
    assert not (tmp_path / "run").exists()
