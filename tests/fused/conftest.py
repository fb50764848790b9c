"""Memory that was NaN."""

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated without being filled holds NaN."""
    monkeypatch.setattr(torch, "empty", _nan_in(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _nan_in(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _nan_in(torch.Tensor.new_empty))


def _nan_in(allocate):
    def allocated(*arguments, **named):
        found = allocate(*arguments, **named)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    return allocated
