"""A ladder that finds every step right."""

import pytest
import torch

import trainstep.ladder.steps as ladder
from tests.ladder.workloads import Trusting


@pytest.fixture
def trusting(monkeypatch):
    monkeypatch.setattr(ladder, "StepCheck", Trusting)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)  # compiled code is tested with the step
