import pytest
import torch

from trainstep.measure.ceilings import measure_ceilings


def test_cpu_ceilings_are_positive_and_per_precision():
    ceilings = measure_ceilings(torch.device("cpu"), ("fp32",))
    assert list(ceilings.matmul_tflops) == ["fp32"]
    assert ceilings.matmul_tflops["fp32"] > 0
    assert ceilings.copy_gb_s > 0


@pytest.mark.gpu
def test_tensor_cores_are_told_from_ordinary_units():
    before = torch.get_float32_matmul_precision()
    ceilings = measure_ceilings(torch.device("cuda"), ("fp32", "tf32", "bf16"))
    assert ceilings.matmul_tflops["tf32"] > 2 * ceilings.matmul_tflops["fp32"]
    assert ceilings.matmul_tflops["bf16"] > 1.2 * ceilings.matmul_tflops["tf32"]
    assert torch.get_float32_matmul_precision() == before
