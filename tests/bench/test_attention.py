import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trainstep.bench.attention as bench
from tools.trust.planted.attention import WRONG
from trainstep.attention.eager import attention_eager
from trainstep.attention.scoring import Scoring
from trainstep.base.errors import UsageError
from trainstep.base.stats import ratio_of_rounds
from trainstep.bench import turns
from trainstep.bench.attention import AttentionTurns
from trainstep.bench.cases import GRIDS, LISTS, AttentionCase, grid_cases, listed_cases, named_grid
from trainstep.check.verdict import Part, Verdict
from trainstep.rows import AttentionRow

SMALL = AttentionCase("sdpa", batch=2, heads=2, seq=64, head_dim=16, causal="yes", dtype="fp32")


def test_no_time_for_a_wrong_answer(monkeypatch):
    def wrong_scale(q, k, v, *, is_causal, window, impl):
        return attention_eager(q, k, v, Scoring(is_causal, 1.01 / math.sqrt(q.shape[-1])))

    monkeypatch.setattr(bench, "attention", wrong_scale)
    (row,) = AttentionTurns("cpu").run([SMALL], warmup=1, passes=1)
    assert row.status == "wrong"
    assert "o in the worst row off by" in row.reason
    assert row.o_error > row.o_allowed > 0
    assert row.error_share > 1000
    assert not any(name.endswith("_ms") for name in row.values)


def test_no_time_where_one_row_of_one_gradient_is_wrong(monkeypatch):
    planted = WRONG["a row of dq zero"]
    monkeypatch.setattr(bench, "attention", lambda q, k, v, *, is_causal, window, impl: planted.implementation(q, k, v))
    case = dataclasses.replace(SMALL, heads=4, seq=128)
    (row,) = AttentionTurns("cpu").run([case], warmup=1, passes=1)
    assert row.status == "wrong"
    assert row.reason.startswith("dq in the worst row off by 0.")
    assert not any(f"{right} in" in row.reason for right in ("o", "dk", "dv"))
    assert row.error_nearest == "dq in the worst row"


def test_the_rows_of_a_shape_come_before_the_next_shape_starts(monkeypatch):
    started = []

    def measured(self, cases, *_):
        started.append(cases[0].seq)
        return [AttentionRow(**dataclasses.asdict(case)) for case in cases]

    monkeypatch.setattr(AttentionTurns, "_in_turns", measured)
    cases = [dataclasses.replace(SMALL, seq=seq, impl=impl) for seq in (16, 32) for impl in ("sdpa", "flash-triton")]
    rows, seen = AttentionTurns("cpu").run(cases, warmup=1, passes=3, rounds=3), []
    for row in rows:
        seen.append((row.kind, row.seq, list(started)))
    first, second = [16], [16, 32]
    assert [each for each in seen if each[1] == 16] == [("attention", 16, first)] * 2 + [("attention ratio", 16, first)]
    assert [each for each in seen if each[1] == 32] == [("attention", 32, second)] * 2 + [
        ("attention ratio", 32, second)
    ]


def test_a_row_has_times_rates_memory_and_errors():
    (row,) = AttentionTurns("cpu").run([SMALL], warmup=1, passes=8)
    assert row.status == "ok", row.reason
    assert row.values["n"] == len(row.samples["both"]) == 8
    assert row.values["both_ms"] == pytest.approx(row.values["forward_ms"] + row.values["backward_ms"], rel=0.5)
    forward = 2 * 2 * 4 * 64 * 64 * 16 / 2  # batch · heads · 4·S²·D, half for causal
    assert row.values["forward_tflops"] == pytest.approx(forward / row.values["forward_ms"] / 1e9)
    assert row.values["both_tflops"] == pytest.approx(3.5 * forward / row.values["both_ms"] / 1e9)
    assert 0 < row.values["before_backward_gib"] < row.values["peak_gib"]
    assert row.values["recompilations_timed"] == 0
    assert 0 < row.values["o_error"] < 1e-6
    assert 0 < row.error_share < 1
    assert row.error_nearest.split()[0] in ("o", "dq", "dk", "dv")


def test_the_same_bits_every_time_is_a_case_of_its_own(monkeypatch):
    asked = []

    def drifting(q, k, v, *, is_causal, window, impl):
        asked.append(torch.are_deterministic_algorithms_enabled())
        o = attention_eager(q, k, v, Scoring(is_causal, 1 / math.sqrt(q.shape[-1])))
        if impl == "flash-reference":  # right, but in its last bits
            o = o * (1 + 1e-7 * (len(asked) % 2))
        return o

    monkeypatch.setattr(bench, "attention", drifting)
    case = dataclasses.replace(SMALL, deterministic="yes")
    cases = [SMALL, case, dataclasses.replace(case, impl="flash-reference")]
    free, same, moved = AttentionTurns("cpu").run(cases, warmup=1, passes=2)
    assert (free.status, same.status) == ("ok", "ok")
    assert "deterministic" not in free.case, "as in rows of before it was a case"
    assert same.case["deterministic"] == "yes"
    assert (moved.status, moved.both_tflops) == ("wrong", None)
    assert moved.reason == "o, dq, dk, dv not the same bits twice under torch.use_deterministic_algorithms"
    first = asked.index(True)
    assert not any(asked[:first])
    assert all(asked[first:])
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_window_is_a_case_of_its_own():
    cases = [dataclasses.replace(SMALL, impl="eager", window=window) for window in (0, 5, 64)]
    whole, longer, window = AttentionTurns("cpu").run(cases, warmup=1, passes=2)
    assert [(row.status, row.window) for row in (whole, longer, window)] == [("ok", None), ("ok", None), ("ok", 5)]
    assert "window" not in whole.case, "as in rows of before there were windows"
    pairs = sum(min(query + 1, 5) for query in range(64))
    assert window.forward_tflops * window.values["forward_ms"] == pytest.approx(2 * 2 * 4 * 16 * pairs / 1e9, rel=0.05)
    (refused,) = AttentionTurns("cpu").run([dataclasses.replace(SMALL, window=5)], warmup=1, passes=2)
    assert refused.status == "unsupported"


@pytest.mark.parametrize("changes", [{}, {"batch": 16, "heads": 32, "seq": 131_072, "head_dim": 128}, {"heads": 0}])
def test_without_a_gpu_our_kernels_name_the_interpreter(monkeypatch, changes):
    small = dataclasses.replace(SMALL, impl="flash-triton")
    case = dataclasses.replace(small, **changes)
    monkeypatch.setattr(
        bench, "check", lambda implementation, shape, *_, **__: implementation(*[torch.empty(shape, device="meta")] * 3)
    )
    (row,) = AttentionTurns("cpu").run([case], warmup=1, passes=1)
    assert row.status == "unsupported"
    assert "TRITON_INTERPRET=1" in row.reason, "within what a row keeps of an error"


@pytest.mark.thorough
def test_implementations_of_a_shape_are_timed_in_turns(monkeypatch):
    order, timed = [], AttentionTurns._time_round

    def noted(self, checked, *rest):
        order.append((checked.implementation, rest))
        timed(self, checked, *rest)

    monkeypatch.setattr(AttentionTurns, "_time_round", noted)
    other = dataclasses.replace(SMALL, seq=32)
    impls = ("sdpa", "eager", "flash-triton")
    cases = [dataclasses.replace(case, impl=impl) for impl in impls for case in (SMALL, other)]
    rows = list(AttentionTurns("cpu").run(cases, warmup=1, passes=7, rounds=3))
    assert [(row.impl, row.seq, row.status) for row in rows] == [
        (impl, seq, "unsupported" if impl == "flash-triton" else "ok") for seq in (64, 32) for impl in impls
    ], "shape by shape, and no ratio to ours, which did not run"
    assert [rest[-2:] for _, rest in order] == [(1, passes) for passes in (2, 2, 3) for _ in range(2)] * 2
    for start in range(0, 12, 2):
        assert order[start][0] is not order[start + 1][0], "each once a round"
    firsts = {order[start][0] for start in range(0, 6, 2)}
    assert len(firsts) == 2, "orders are drawn anew"
    for row in rows:
        if row.status == "ok":
            assert (row.n, row.rounds, len(row.samples["both"])) == (7, 3, 7)


def _timed(impl, rounds, *milliseconds):
    case = dataclasses.asdict(dataclasses.replace(SMALL, impl=impl))
    samples = dict.fromkeys(("forward", "backward", "both"), milliseconds)
    return AttentionRow(**case, rounds=rounds, samples=samples)


def test_ours_stands_beside_each_other_by_rounds():
    ours = _timed("flash-triton", 3, 1.0, 1.0, 1.1, 1.1, 1.05, 1.05)
    theirs = _timed("sdpa", 3, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    failed = dataclasses.replace(_timed("flex", None), status="failed")
    (row,) = AttentionTurns("cpu").ratios([theirs, ours, failed])
    assert (row.impl, row.peer, row.seq, row.rounds) == ("flash-triton", "sdpa", 64, 3)
    wanted = ratio_of_rounds([[1.0], [1.1], [1.05]], [[2.0]] * 3)
    assert (row.both, row.both_low, row.both_high) == (wanted.value, wanted.interval.low, wanted.interval.high)
    assert row.forward == row.backward == row.both
    assert 0.45 < row.both_low < row.both < row.both_high < 0.6


def test_compilation_is_counted_and_kept_out_of_the_passes():
    case = dataclasses.replace(SMALL, impl="eager-compiled", seq=32)
    (row,) = AttentionTurns("cpu").run([case], warmup=1, passes=7)
    if row.status == "unsupported":
        pytest.skip(row.reason)
    assert row.status == "ok", row.reason
    assert row.values["compilations"] >= 1
    assert row.values["recompilations_timed"] == 0
    # The fastest pass: other processes on the machine may hold up any number of them, and cannot make one faster.
    assert row.values["check_s"] > 10 * min(row.samples["both"]) / 1e3


def test_a_compilation_during_the_timed_passes_is_counted(monkeypatch):
    calls = []

    def compiled_anew(q, k, v, *, is_causal, window, impl):
        calls.append(impl)
        plain = torch.compile(lambda x, n: x * n / n, backend="eager", dynamic=False)  # one graph for each n
        return plain(attention_eager(q, k, v, Scoring(is_causal, 1 / math.sqrt(q.shape[-1]))), 2 ** len(calls))

    monkeypatch.setattr(bench, "attention", compiled_anew)
    case = dataclasses.replace(SMALL, impl="eager-compiled")  # an implementation whose memory is not followed on a CPU
    (row,) = AttentionTurns("cpu").run([case], warmup=1, passes=2)
    assert row.status == "ok", row.reason
    assert row.compilations == 1
    assert row.recompilations_timed == 3, "one in the warm-up, one in each pass"


class Order(TorchDispatchMode):
    """The bytes of each tensor that is overwritten with zeros, and the passes, in the order they happen."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.zero_.default:
            self.events.append(args[0].nbytes)
        return function(*args, **kwargs or {})


def test_the_cache_is_overwritten_before_each_pass(monkeypatch):
    order = Order()

    def implementation(q, k, v):
        order.events.append("forward")
        return attention_eager(q, k, v, Scoring(True, 1 / math.sqrt(q.shape[-1])))

    monkeypatch.setitem(turns.FLUSH_BYTES, "cpu", 12345)
    monkeypatch.setattr(AttentionTurns, "implementation", lambda self, case: implementation)
    monkeypatch.setattr(bench, "check", lambda *_, **__: Verdict(parts={f"{name} all": Part() for name in bench.NAMES}))
    case = dataclasses.replace(SMALL, impl="eager-compiled")  # whose memory is not followed on a CPU
    with order:
        list(AttentionTurns("cpu").run([case], warmup=1, passes=3))
    assert order.events == [12345, "forward"] * 4


@pytest.mark.gpu
def test_the_cache_is_overwritten_on_a_gpu():
    order, flushed = Order(), turns.FLUSH_BYTES["cuda"]

    def implementation(q, k, v):
        order.events.append("forward")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    flush = torch.empty(flushed, dtype=torch.int8, device="cuda")
    with order:
        turns.time_passes(AttentionTurns("cuda").step(SMALL, implementation), flush, 1, 2)
    assert order.events.count("forward") == 3
    before = [order.events[place - 1] for place, each in enumerate(order.events) if each == "forward"]
    assert before == [flushed] * 3
    assert 3 <= order.events.count(flushed) <= 1 + 2 * turns.MOST_FLUSHES


def test_what_cannot_run_here_is_a_row():
    cases = [dataclasses.replace(SMALL, impl=impl) for impl in ("flash-triton", "sdpa-cudnn", "flash-attn", "sdpa")]
    rows = list(AttentionTurns("cpu").run(cases, warmup=1, passes=1))
    assert [row.status for row in rows] == ["unsupported"] * 3 + ["ok"]
    assert "NVIDIA" in rows[0].reason
    assert rows[0].values["predicted_peak_gib"] > 0


def test_named_grids_are_those_of_the_assignment():
    naive = named_grid("naive", {})
    assert len(naive) == 4 * 5 * 2
    assert {case.shape for case in naive} >= {(8, 16384, 128), (8, 256, 16)}
    flash = named_grid("flash", {})
    assert {case.seq for case in flash} == {2**power for power in range(7, 17)}
    assert {case.dtype for case in flash} == {"bf16", "fp32"}
    (board,) = listed_cases("leaderboard", {})
    assert (board.shape, board.is_causal) == ((1, 16, 16384, 64), True)
    assert len(LISTS["peers"]) == 10


def test_axes_apply_to_every_shape_of_a_list_and_shapes_are_its_own():
    both = {"impl": ("flash-triton", "sdpa-flash"), "deterministic": ("yes",), "dtype": ("fp16",)}
    cases = listed_cases("peers", both)
    assert len(cases) == 2 * len(LISTS["peers"])
    assert {(case.impl, case.is_deterministic, case.dtype) for case in cases} == {
        ("flash-triton", True, "fp16"),
        ("sdpa-flash", True, "fp16"),
    }
    for axis in ("head_dim", "window"):
        with pytest.raises(UsageError, match=f"--case peers has shapes of its own, and --{axis.replace('_', '-')} is"):
            listed_cases("peers", {axis: (64,)})


def test_a_grid_runs_what_is_there_to_be_read_on_short_rows_alone_unless_it_is_asked_for():
    lengths = {case.seq for case in named_grid("flash", {}) if case.impl == "flash-reference"}
    assert lengths == {2**power for power in range(7, 12)}
    assert {case.seq for case in named_grid("flash", {}) if case.impl == "flash-triton"} == set(GRIDS["flash"]["seq"])
    asked = named_grid("flash", {"impl": ("flash-reference",), "seq": (4096,), "head_dim": (16,)})
    assert [(case.seq, case.dtype) for case in asked] == [(4096, "bf16"), (4096, "fp32")]


@pytest.mark.parametrize(
    "axes",
    [{"seq": (0,)}, {"heads": (-1,)}, {"head_dim": (-8,)}, {"window": (-1,)}, {"window": (8,), "causal": ("no",)}],
)
def test_impossible_cases(axes):
    with pytest.raises(UsageError, match="impossible attention case"):
        grid_cases(axes)


@pytest.mark.parametrize(("warmup", "passes", "rounds"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_run(warmup, passes, rounds):
    with pytest.raises(UsageError, match="expected at least one of each"):
        list(AttentionTurns("cpu").run([SMALL], warmup=warmup, passes=passes, rounds=rounds))


@pytest.mark.gpu
def test_long_sequences_need_memory_linear_in_their_length():
    cases = [AttentionCase("flash-triton", heads=1, seq=seq, head_dim=128) for seq in (16384, 32768)]
    short, long = AttentionTurns("cuda").run(cases, warmup=1, passes=2)
    assert short.status == long.status == "ok", (short.reason, long.reason)
    for row in (short, long):
        assert row.values["before_backward_gib"] == pytest.approx(row.values["predicted_before_backward_gib"], rel=0.02)
    assert long.values["peak_gib"] == pytest.approx(2 * short.values["peak_gib"], rel=0.05)
