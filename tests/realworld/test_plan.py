"""Peaks of models that nobody here wrote, predicted from a traced step and measured."""

import pytest

from tests.realworld import models
from trainstep.base.config import StepConfig
from trainstep.bench.memory import measure_peaks
from trainstep.bench.tracing import trace_step
from trainstep.step.workload import factory_source

pytestmark = pytest.mark.realworld
NAMES = ("llama", "gpt2", "qwen3", "gemma2", "phi", "bert", "mixtral", "t5", "vit", "resnet", "lora")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.thorough), "bf16"])
def test_the_peak_is_predicted_within_five_percent(name, precision):
    pytest.importorskip(models.MODELS[name])
    source, config = factory_source(f"tests.realworld.models:{name}"), StepConfig(precision=precision, device="cpu")
    traced, measured = trace_step(source, config), measure_peaks(source, config, "step")
    assert traced.peak == pytest.approx(measured.peak, rel=0.05)
    if name == "lora":
        assert traced.gradients < 0.05 * traced.weights, "what is frozen has no gradients"
