"""Liger-Kernel's operators are called with the settings that the peer's file says."""

import sys
import types

import pytest
import torch

from trainstep.base.errors import UnsupportedError
from trainstep.fused import liger


class Recorded:
    """Stands for a module of autograd functions: their arguments are kept."""

    def __init__(self, result):
        self.calls, self._result = {}, result

    def __getattr__(self, name):
        def apply(*given):
            self.calls[name] = given
            return self._result

        return types.SimpleNamespace(apply=apply)


def test_settings(monkeypatch) -> None:
    ops = Recorded(result=("first", "second"))
    monkeypatch.setattr(liger, "installed", lambda: ("liger-kernel 0", ops))
    x, w = torch.ones(2, 4), torch.ones(4)
    tables = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    assert liger.rope_tables(*tables)[0].tolist() == [[[1.0, 2.0, 1.0, 2.0]]]
    liger.rope(x, x, *tables)
    assert liger.linear_cross_entropy(x, x, w) == "first"
    assert ops.calls["LigerRopeFunction"][2].shape == (1, 1, 4)
    loss = ops.calls["LigerFusedLinearCrossEntropyFunction"]
    assert loss[3:] == (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
    liger.linear_cross_entropy(x, x, w, float32_sum=False)
    assert ops.calls["LigerFusedLinearCrossEntropyFunction"][-1] is None


def test_its_functions_take_them_in_this_order() -> None:
    """Where Liger-Kernel is installed."""
    ops = pytest.importorskip("liger_kernel.ops", exc_type=ImportError)
    import inspect

    def names(function):
        return list(inspect.signature(function.forward).parameters)[1:]

    assert names(ops.LigerRopeFunction)[:4] == ["q", "k", "cos", "sin"]
    assert names(ops.LigerFusedLinearCrossEntropyFunction)[3:12] == [
        *("bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap"),
        *("return_z_loss", "accum_dtype"),
    ]


def test_without_it_the_error_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    liger.installed.cache_clear()
    with pytest.raises(UnsupportedError, match="pip install liger-kernel"):
        liger.installed()
    liger.installed.cache_clear()
