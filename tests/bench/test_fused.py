"""`bench fused`: cases, what is checked before it is timed, rows and ratios, with plain torch alone.

Ours runs in tests/fused, in Triton's interpreter.
"""

import dataclasses

import pytest
import torch

from trainstep.base.config import SIZES, ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.base.operators import FUSED, Fused
from trainstep.bench.cases import FUSED_AXES, FUSED_SHAPES, FusedCase, fused_cases
from trainstep.bench.fused import FusedTurns, require_small
from trainstep.check import fused as checks
from trainstep.fused import eager
from trainstep.measure.profile.kernels import kernel_family
from trainstep.rows import FusedRow
from trainstep.step.training_step import build_step
from trainstep.step.workload import builtin_source

ROPE = FusedCase("eager", "rope", "tiny", "fp32")
CPU = torch.device("cpu")


def rows(*cases, count=2, rounds=1):
    return list(FusedTurns("cpu").run(cases, warmup=1, passes=count, rounds=rounds))


def checked(entry, implementation):
    return checks.check_operator(entry, implementation, FUSED_SHAPES["tiny"], torch.float32, CPU)


def test_everything_there_is_is_measured_by_default() -> None:
    cases = fused_cases(FUSED_AXES)
    assert len(cases) == 4 * sum(len(each.forms) for each in FUSED.values())
    assert {case.shape for case in cases} == set(FUSED_SHAPES) - {"tiny"}
    with pytest.raises(UsageError, match=r"no such implementation .*: chunked; there are rope: eager, compiled"):
        fused_cases(dict(FUSED_AXES) | {"operator": ("rope",), "impl": ("chunked",)})


@pytest.mark.parametrize("name", ["small", "2.7B"])
def test_shapes_are_those_of_our_models(name) -> None:
    sizes, model = FUSED_SHAPES[name], SIZES[name]
    assert (sizes.d_model, sizes.heads, sizes.vocab_size) == (model.d_model, model.num_heads, model.vocab_size)


@pytest.mark.parametrize("operator", [name for name, each in FUSED.items() if "eager" in each.forms])
def test_plain_torch_is_right_and_has_times(operator) -> None:
    (row,) = rows(dataclasses.replace(ROPE, operator=operator))
    assert row.status == "ok", row.reason
    assert 0 < row.error_share <= 0.5, "plain torch uses at most half of its own budget"
    assert set(row.samples) == set(row.times) == {"forward", "backward", "both"}
    assert (row.n, row.vocab_size) == (2, 301)


def test_our_models_chunked_loss_is_one_of_the_peers() -> None:
    (row,) = rows(FusedCase("chunked", "linear-cross-entropy", "tiny", "fp32"))
    assert row.status == "ok", row.reason


def test_what_cannot_run_here_is_a_row() -> None:
    ours, liger = rows(dataclasses.replace(ROPE, impl="ours"), dataclasses.replace(ROPE, impl="liger"))
    assert [each.status for each in (ours, liger)] == ["unsupported"] * 2
    assert "runs on NVIDIA GPUs, and this is cpu" in ours.reason
    assert "runs on a GPU" in liger.reason or "run on a GPU" in liger.reason


def test_the_interpreter_is_for_tiny_shapes(monkeypatch) -> None:
    for module in ("attention.flash", "fused.operators"):
        monkeypatch.setattr(f"trainstep.{module}.INTERPRETED", True)
    require_small(ROPE, CPU)
    for changes, reason in (
        ({"shape": "small"}, "choose --shape tiny"),
        ({"dtype": "bf16"}, "choose --dtype fp32,fp16"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            require_small(dataclasses.replace(ROPE, **changes), CPU)


@pytest.mark.parametrize("operator", FUSED)
def test_no_time_for_a_wrong_answer(monkeypatch, operator) -> None:
    """A result too large by a thousandth, whose gradients are then wrong too."""
    right = checks.oracle_of(FUSED[operator])

    def wrong(*inputs):
        results = right(*inputs)
        return tuple(1.001 * each for each in results) if isinstance(results, tuple) else 1.001 * results

    monkeypatch.setattr(FusedTurns, "implementation", lambda self, case: wrong)
    (row,) = rows(dataclasses.replace(ROPE, operator=operator))
    assert row.status == "wrong"
    assert row.error_share > 100
    assert not row.times
    assert all(f"{name} off by" in row.reason for name in FUSED[operator].names)


@pytest.mark.parametrize("operator", FUSED)
def test_what_is_wrong_in_the_last_tokens_alone_is_found(monkeypatch, operator) -> None:
    """As a kernel is whose addresses overflow where tensors are large."""
    monkeypatch.setattr(checks, "CHECK_TOKENS", 8)
    monkeypatch.setattr(checks, "LAST_TOKENS", 4)
    entry, sizes = FUSED[operator], FUSED_SHAPES["tiny"]
    oracle = checks.oracle_of(entry)
    assert checked(entry, oracle).is_right
    first, along = 0, entry.by_token[0]

    def wrong(*inputs):
        tokens = inputs[first].shape[along]
        if tokens == sizes.tokens:  # the last token is the one before it
            places = [*range(tokens - 1), tokens - 2]
            inputs = (inputs[first].index_select(along, torch.tensor(places)), *inputs[1:])
        return oracle(*inputs)

    budget = checked(entry, wrong)
    assert not budget.is_right
    assert "of the last tokens off by" in str(budget)


def test_nan_and_what_has_no_finite_budget_are_wrong() -> None:
    x = torch.ones(3, requires_grad=True)
    budget = checks.check(lambda x: x * float("nan"), lambda x: x * 1.0, [x], ("y", "dx"))
    assert not budget.is_right
    assert budget.parts["y"].share == float("inf")
    budget = checks.check(lambda x: x * 1.0, lambda x: x * torch.tensor(1e30) * 1e30 * 1e-60, [x], ("y", "dx"))
    assert not budget.is_right, "the plain formula overflows, which says nothing of the other"


def test_a_peer_that_writes_over_its_inputs_is_judged_by_what_it_returned() -> None:
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, cos, sin):
            ctx.save_for_backward(cos, sin)
            ctx.over = [x.detach().copy_(y) for x, y in zip((q, k), eager.rope(q, k, cos, sin), strict=True)]
            return tuple(ctx.over)

        @staticmethod
        def backward(ctx, dq, dk):
            cos, sin = ctx.saved_tensors
            for x in ctx.over:
                x.detach().zero_()
            over = (x.copy_(y) for x, y in zip((dq, dk), eager.rope(dq, dk, cos, -sin), strict=True))
            return *over, None, None

    assert checked(FUSED["rope"], InPlace.apply).is_right


def _timed(impl, *milliseconds):
    case = dataclasses.asdict(dataclasses.replace(ROPE, impl=impl)) | dataclasses.asdict(ROPE.sizes)
    return FusedRow(**case, rounds=3, samples={"both": milliseconds})


def test_ours_stands_beside_each_other() -> None:
    failed = dataclasses.replace(_timed("liger"), status="failed")
    (row,) = FusedTurns("cpu").ratios([_timed("eager", 2.0, 2.0, 2.0), _timed("ours", 1.0, 1.1, 1.05), failed])
    assert (row.operator, row.impl, row.peer, row.tokens, row.rounds) == ("rope", "ours", "eager", 12, 3)
    assert 0.45 < row.both_low < row.both < row.both_high < 0.6


def test_nothing_to_run() -> None:
    with pytest.raises(UsageError, match="expected at least one of each"):
        list(FusedTurns("cpu").run([ROPE], warmup=0, passes=1))


def test_rows_are_shown_with_their_section() -> None:
    from trainstep.report.subjects import SECTIONS, make_tables

    found = [*rows(ROPE), _timed("ours", 1.0, 1.1, 1.05), _timed("eager", 2.0, 2.0, 2.0)]
    found += list(FusedTurns("cpu").ratios(found[1:]))
    assert {table.name for table in make_tables(found)} == {"fused-operator", "fused-ratio"}
    assert "fused" in {each.name for rule in SECTIONS if (each := rule(found)) is not None}


def test_an_entry_is_all_that_benches_checks_and_profiles_ask_for(monkeypatch) -> None:
    """A toy operator: its oracle with its inputs and its own function in `fused.eager`, and one entry."""
    for name, function in {
        "halved": lambda x: x / 2,
        "halved_inputs": lambda sizes, tokens, draw: (draw(tokens, sizes.d_model),),
        "halved_by_a_product": lambda x: x * 0.5,
        "halved_wrong": lambda x: x * 0.51,
    }.items():
        monkeypatch.setattr(eager, name, function, raising=False)
    forms = {"eager": "", "chunked": "fused.eager:halved_by_a_product", "ours": "fused.eager:halved_wrong"}
    entry = Fused("halved_inputs", "halved", ("y", "dx"), {0: 0}, forms, kernels={"halving_kernel": "elementwise"})
    assert kernel_family("halving_kernel_") == "other"
    monkeypatch.setitem(FUSED, "halve", entry)
    monkeypatch.setattr("trainstep.bench.fused.require_small", lambda case, device: None)
    cases = fused_cases({"operator": ["halve"], "impl": ["eager", "compiled", "chunked", "ours"], "shape": ["tiny"]})
    assert [case.impl for case in cases] == ["eager", "chunked", "ours"]
    plain, right, wrong = rows(*(dataclasses.replace(case, dtype="fp32") for case in cases))
    assert (plain.status, right.status, wrong.status) == ("ok", "ok", "wrong")
    assert "y off by 0.02" in wrong.reason
    assert kernel_family("halving_kernel") == "elementwise"


@pytest.mark.parametrize("change", [{"fused": "rope"}, {"loss": "fused"}])
def test_a_step_with_fused_operators_is_refused_on_a_cpu(change) -> None:

    source = builtin_source("toy", ModelConfig(vocab_size=256, d_model=16, num_layers=1))
    with pytest.raises(UnsupportedError, match="a step with fused operators runs on NVIDIA GPUs, and this is cpu"):
        build_step(source, StepConfig(device="cpu", context=8, **change))
