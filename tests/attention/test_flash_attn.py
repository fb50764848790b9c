"""FlashAttention's own packages: found where they are, handed what they expect, and refused by name where not."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.attention.budget import Case, assert_within_budget, value_and_gradients
from trainstep.attention import attention, flash_attn
from trainstep.attention.eager import attention_eager
from trainstep.attention.scoring import Scoring
from trainstep.base.errors import UnsupportedError, UsageError


def in_bshd(
    q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, window_size: tuple[int, int] | None = None
) -> torch.Tensor:
    """What `flash_attn_func` does, by the oracle; window_size is the keys before the own and after it."""
    assert window_size is None or window_size[1] == 0
    window = None if window_size is None else window_size[0] + 1
    scoring = Scoring(causal, softmax_scale, window)
    return attention_eager(*(each.transpose(1, 2) for each in (q, k, v)), scoring).transpose(1, 2)


def both(function: Any) -> flash_attn.Functions:
    """A package with one function for all."""
    return flash_attn.Functions(function, function)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    flash_attn.installed.cache_clear()
    yield
    flash_attn.installed.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """These modules of PACKAGES, those that are None missing."""
    for module, function in functions.items():
        name = module.replace("__", ".")
        made = None if function is None else ModuleType(name)
        if made is not None and function is not ...:
            made.flash_attn_func = made.flash_attn_varlen_func = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 40, 16), (4, 40, 16), (40, 16), (2, 3, 4, 40, 16)], ids=str)
def test_layout_scale_mask_and_gradients(shape: tuple[int, ...], with_lse: bool, is_causal: bool) -> None:
    q, k, v, do = (torch.randn(shape, generator=torch.Generator().manual_seed(each)) for each in range(4))
    shapes = []

    def function(*tensors: Any, **settings: Any) -> Any:
        shapes.append(tensors[0].shape)
        o = in_bshd(*tensors, **settings)
        return (o, None) if with_lse else o

    scoring = Scoring(is_causal, 0.3)
    actual = value_and_gradients(lambda *t: flash_attn.in_its_layout(both(function), *t, scoring), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, is_causal, 0.3)
    heads = shape[-3] if len(shape) > 2 else 1
    assert shapes[0][1:] == (40, heads, 16), "batch, length, heads, head_dim"


def test_a_softcap_is_handed_on() -> None:
    q = torch.zeros(1, 2, 8, 16)
    seen = []
    package = both(lambda *tensors, **settings: seen.append(settings) or tensors[0])
    flash_attn.in_its_layout(package, q, q, q, Scoring(True, 0.3, softcap=2.0))
    assert seen == [{"softmax_scale": 0.3, "causal": True, "softcap": 2.0}]


def test_the_same_bits_are_asked_of_it_where_they_are_asked_of_pytorch(deterministic: None) -> None:
    q = torch.zeros(1, 2, 8, 16)
    seen = []
    package = both(lambda *tensors, **settings: seen.append(settings) or tensors[0])
    flash_attn.in_its_layout(package, q, q, q, Scoring(True, 0.3))
    assert seen == [{"softmax_scale": 0.3, "causal": True, "deterministic": True}]


def test_a_window_counts_the_own_key_and_its_window_size_does_not() -> None:
    q, k, v, do = Case(40, 40, 16).inputs(torch.float32)
    scoring = Scoring(True, 0.3, 7)
    actual = value_and_gradients(lambda *t: flash_attn.in_its_layout(both(in_bshd), *t, scoring), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, True, 0.3, 7)


def test_the_newest_that_is_installed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    three, four = (lambda *_, **__: None), (lambda *_, **__: None)
    install(monkeypatch, flash_attn__cute=four, flash_attn_interface=three)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "4.0.0b36")
    assert flash_attn.installed() == ("flash-attn-4 4.0.0b36", both(four))
    flash_attn.installed.cache_clear()
    install(monkeypatch, flash_attn__cute=None, flash_attn_interface=three)
    assert flash_attn.installed()[1] == both(three)
    assert flash_attn.installed()[0].startswith("flash-attn-3")


def test_without_either_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, flash_attn__cute=None, flash_attn_interface=...)
    with pytest.raises(
        UnsupportedError, match=r"pip install flash-attn-4.*flash_attn\.cute: .*; flash_attn_interface: "
    ):
        flash_attn.installed()


class _OnGpu:
    """What is read of a tensor before a kernel starts."""

    def __init__(self, length: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = torch.Size((1, 2, length, 64)), dtype, torch.device("cuda")


def test_what_it_cannot_run_is_refused() -> None:
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(UsageError, match=r"NVIDIA GPUs in float16 and bfloat16; got .* float32 on cpu"):
        attention(q, q, q, impl="flash-attn")
    long, short = _OnGpu(8), _OnGpu(5)
    with pytest.raises(UsageError, match="from the end of the keys"):
        flash_attn.attention_flash_attn(short, long, long, Scoring(True, 1.0))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 130)])
@pytest.mark.parametrize("case", [Case(512, 512, 64), Case(300, 300, 128, heads=4, kv_heads=2)], ids=str)
def test_on_a_gpu(case: Case, is_causal: bool, window: int | None) -> None:
    try:
        flash_attn.installed()
    except UnsupportedError as error:
        pytest.skip(str(error))
    q, k, v, do = (each.cuda() for each in case.inputs(torch.bfloat16))
    actual = value_and_gradients(
        lambda *t: attention(*t, is_causal=is_causal, window=window, impl="flash-attn"), q, k, v, do
    )
    assert_within_budget(actual, q, k, v, do, is_causal, case.head_dim**-0.5, window)
