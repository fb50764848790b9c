"""What PyTorch ships, through our names: the same numbers, and no silent substitute."""

import pytest
import torch

from tests.attention.budget import Case, assert_within_budget, value_and_gradients
from trainstep.attention import attention
from trainstep.base.errors import UsageError

ON_CPU = ["sdpa", "sdpa-flash", "sdpa-math", "eager-compiled"]


@pytest.mark.parametrize("impl", ON_CPU)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", [Case(40, 40, 16), Case(30, 50, 16, heads=4, kv_heads=2)], ids=str)
def test_output_and_gradients(impl: str, case: Case, is_causal: bool) -> None:
    q, k, v, do = case.inputs(torch.float32)
    actual = value_and_gradients(lambda *t: attention(*t, is_causal=is_causal, impl=impl), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, is_causal, case.head_dim**-0.5)


@pytest.mark.parametrize("impl", ["sdpa-cudnn", "sdpa-efficient"])
def test_a_backend_that_cannot_run_is_not_replaced(impl: str) -> None:
    q, k, v, _ = Case(8, 8, 16).inputs(torch.float32)
    with pytest.raises(UsageError, match=f"{impl}.* float32 on cpu.*PyTorch has no such kernel for them"):
        attention(q, k, v, impl=impl)


@pytest.mark.parametrize("impl", ["sdpa", "sdpa-math"])
def test_windows_are_refused_by_what_has_none(impl: str) -> None:
    q, k, v, _ = Case(8, 8, 16).inputs(torch.float32)
    with pytest.raises(UsageError, match=f"impl='{impl}' takes no window.*use one of eager"):
        attention(q, k, v, is_causal=True, window=3, impl=impl)


@pytest.mark.parametrize(
    ("impl", "match"), [("sdpa", "takes no softcap: PyTorch's"), ("sdpa-flash", "takes no softcap; use")]
)
def test_softcaps_are_refused(impl: str, match: str) -> None:
    q, k, v, _ = Case(8, 8, 16).inputs(torch.float32)
    with pytest.raises(UsageError, match=f"impl='{impl}' {match}"):
        attention(q, k, v, softcap=2.0, impl=impl)


def test_windows_compiled() -> None:
    q, k, v, do = Case(40, 40, 16).inputs(torch.float32)
    actual = value_and_gradients(lambda *t: attention(*t, is_causal=True, window=7, impl="eager-compiled"), q, k, v, do)
    assert_within_budget(actual, q, k, v, do, True, 0.25, 7)


def test_more_shapes_than_torch_compile_keeps_by_default_stay_compiled() -> None:
    for n in range(1, 12):
        q, k, v, do = Case(n, n, 8).inputs(torch.float32)
        o = attention(q, k, v, impl="eager-compiled")  # fullgraph: beyond the limit this would raise
        assert_within_budget({"o": o}, q, k, v, do, False, 8**-0.5)


def test_the_same_call_again_compiles_nothing_anew() -> None:
    q, k, v, _ = Case(12, 12, 8).inputs(torch.float32)

    def call(offsets: list[int], softcap: float) -> None:
        attention(q, k, v, cu_seqlens=torch.tensor(offsets), softcap=softcap, impl="eager-compiled")

    call([0, 5, 12], 2.0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        call([0, 9, 12], 2.0)  # other documents, which are values on the device
        with pytest.raises(torch._dynamo.exc.RecompileError):
            call([0, 9, 12], 3.0)
