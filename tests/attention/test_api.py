"""`attention`: what it accepts, what it refuses, and that it runs what it was told to."""

import contextlib
import subprocess
import sys
import typing
from functools import partial

import pytest
import torch

import trainstep.attention
from trainstep.attention import IMPLEMENTATIONS, attention, choose, flash_attention, inputs, tuned
from trainstep.base.config import AttentionImpl
from trainstep.base.errors import UsageError

Q = torch.zeros(2, 4, 6, 16)
BAD = {
    "q is no tensor": (TypeError, [[1.0]], Q, Q),
    "integers": (TypeError, Q.int(), Q.int(), Q.int()),
    "two dtypes": (TypeError, Q, Q.double(), Q),
    "two devices": (UsageError, Q, Q.to("meta"), Q),
    "one dimension": (UsageError, Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]),
    "different numbers of dimensions": (UsageError, Q, Q[0], Q[0]),
    "k and v differ": (UsageError, Q, Q, Q[:, :, :5]),
    "head_dim differs": (UsageError, Q, Q[..., :8], Q[..., :8]),
    "batch differs": (UsageError, Q, Q[:1], Q[:1]),
    "heads do not divide": (UsageError, Q, Q[:, :3], Q[:, :3]),
    "batches of 3-D tensors are not shared": (UsageError, Q[0], Q[0, :2], Q[0, :2]),
    "no queries": (UsageError, Q[:, :, :0], Q, Q),
    "no keys": (UsageError, Q, Q[:, :, :0], Q[:, :, :0]),
    "no batch": (UsageError, Q[:0], Q[:0], Q[:0]),
}


@pytest.mark.parametrize("impl", ["auto", "eager", "sdpa", "flash-reference", "flash-triton"])
@pytest.mark.parametrize("what", BAD)
def test_bad_inputs(what: str, impl: str) -> None:
    error, q, k, v = BAD[what]
    with pytest.raises(error, match="got"):
        attention(q, k, v, impl=impl)  # type: ignore[arg-type]


def test_the_message_shows_what_came() -> None:
    with pytest.raises(UsageError, match=r"q \(2, 4, 6, 16\) float32 on cpu, k \(2, 4, 6, 8\) float32 on cpu"):
        attention(Q, Q[..., :8], Q[..., :8])


def test_unknown_implementation() -> None:
    with pytest.raises(UsageError, match="expected one of eager, eager-compiled"):
        attention(Q, Q, Q, impl="fast")


@pytest.mark.parametrize(
    ("window", "is_causal", "match"),
    [
        (0, True, "window is 0; expected how many keys"),
        (2.0, True, "window is 2.0; expected how many keys"),
        (True, True, "window is True; expected"),
        (3, False, "window=3 counts the keys up to a query's own, and is_causal is False; pass is_causal=True"),
    ],
)
@pytest.mark.parametrize("impl", ["auto", "eager", "flash-reference", "flash-triton"])
def test_bad_windows(impl: str, window: int, is_causal: bool, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        attention(Q, Q, Q, window=window, is_causal=is_causal, impl=impl)


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("nan"), float("inf"), "50"])
@pytest.mark.parametrize("impl", ["auto", "eager", "flash-reference", "flash-triton"])
def test_bad_softcaps(impl: str, softcap: float) -> None:
    with pytest.raises(UsageError, match=r"softcap is .*; expected a finite number above 0"):
        attention(Q, Q, Q, softcap=softcap, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "eager", "flash-reference", "sdpa"])
def test_a_window_as_long_as_the_sequence_is_none(impl: str) -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 16)
    expected = attention(q, k, v, is_causal=True, impl=impl)
    for window in (6, 100, 2**40):
        assert torch.equal(attention(q, k, v, is_causal=True, window=window, impl=impl), expected)


def test_windows_of_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(Q, Q, Q, True, is_plain=False) == "eager"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for q, expected in ((_OnHopper(1, 2, 64, 64), "flash-triton"), (_OnHopper(1, 2, 64, 512), "eager")):
        q.ndim = 4  # type: ignore[attr-defined]
        assert choose(q, q, q, True, is_plain=False) == expected  # type: ignore[arg-type]


def test_triton_is_refused_on_the_cpu() -> None:
    with pytest.raises(UsageError, match="run on NVIDIA GPUs"):
        attention(Q, Q, Q, impl="flash-triton")


def test_auto_says_what_it_runs() -> None:
    assert choose(Q, Q, Q, is_causal=True) == "sdpa"
    torch.testing.assert_close(attention(Q, Q, Q), attention(Q, Q, Q, impl="sdpa"))


class _OnHopper:
    """What `choose` reads of a tensor, for a GPU that is not here."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device("cuda")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {("sm_90", "bfloat16", 64, True): ((0, "sdpa-cudnn"), (2048, "flash-triton"))}
    monkeypatch.setattr(tuned, "FASTEST", rows)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("table")
def test_auto_is_what_was_fastest_at_this_length() -> None:
    for length, expected in ((1, "sdpa-cudnn"), (2047, "sdpa-cudnn"), (2048, "flash-triton"), (10**6, "flash-triton")):
        q = _OnHopper(1, 2, length, 64)
        assert choose(q, q, q, True) == expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("table")
def test_what_was_not_measured_is_left_to_pytorch() -> None:
    q = _OnHopper(1, 2, 4096, 64)
    grouped, shorter = _OnHopper(1, 1, 4096, 64), _OnHopper(1, 2, 100, 64)
    half, wide = _OnHopper(1, 2, 4096, 64, dtype=torch.float16), _OnHopper(1, 2, 4096, 128)
    assert choose(q, q, q, False) == "sdpa"  # type: ignore[arg-type]
    for others in ((q, grouped, grouped), (q, shorter, shorter), (half, half, half), (wide, wide, wide)):
        assert choose(*others, True) == "sdpa"  # type: ignore[arg-type]


@pytest.mark.gpu
def test_auto_runs_what_it_says() -> None:
    q = torch.randn(1, 2, 300, 256, device="cuda", dtype=torch.bfloat16)
    name = choose(q, q, q, True)
    assert torch.equal(attention(q, q, q, is_causal=True), attention(q, q, q, is_causal=True, impl=name))


@pytest.mark.gpu
def test_auto_in_compiled_code() -> None:
    q = torch.randn(1, 2, 300, 256, device="cuda", dtype=torch.bfloat16)

    def around(q: torch.Tensor) -> torch.Tensor:
        return attention(q * 1.0, q, q, is_causal=True) * 1.0

    vars(tuned).pop("FASTEST", None)
    torch.testing.assert_close(torch.compile(around, fullgraph=True)(q), attention(q, q, q, is_causal=True))


def test_flags_offer_what_there_is() -> None:
    assert sorted(IMPLEMENTATIONS) == sorted(typing.get_args(AttentionImpl))


@pytest.mark.parametrize(
    "call", [flash_attention, partial(attention, impl="flash-triton"), partial(attention, impl="sdpa")]
)
def test_inputs_are_cast_and_checked_once(call, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("_require_tensors", "_as_autocast", "_check_dtypes_and_shapes"):
        original = getattr(inputs, name)
        monkeypatch.setattr(inputs, name, lambda *t, of=original: calls.append(of.__name__) or of(*t))
    with torch.autocast("cpu", torch.bfloat16), contextlib.suppress(UsageError):  # no GPU: refused after the checks
        call(Q, Q, Q)
    assert calls == ["_require_tensors", "_as_autocast", "_check_dtypes_and_shapes"]


@pytest.mark.parametrize("impl", ["eager", "sdpa", "flash-reference"])
def test_autocast_casts_as_sdpa_does(impl: str) -> None:
    q = torch.randn(1, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q.bfloat16(), q, impl=impl).dtype == torch.bfloat16
        assert attention(q.double(), q.double(), q.double(), impl="eager").dtype == torch.float64


def test_every_public_name_is_there_and_no_other() -> None:
    for name in trainstep.attention.__all__:
        assert name in dir(trainstep.attention)
        assert getattr(trainstep.attention, name) is not None
    assert set(IMPLEMENTATIONS) >= {"eager", "flash-reference", "flash-triton", "sdpa", "flex", "auto"}
    with pytest.raises(AttributeError, match="flash_attention_4"):
        _ = trainstep.attention.flash_attention_4


def test_triton_is_not_imported_until_it_is_used() -> None:
    code = (
        "import sys, torch; before = 'triton' in sys.modules\n"
        "from trainstep.attention import attention, FlashAttentionReference\n"
        "q = torch.zeros(4, 8); attention(q, q, q, impl='eager'); attention(q, q, q)\n"
        "assert before or 'triton' not in sys.modules\n"
        "assert 'trainstep.attention.triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
