"""Every kernel compiled for GPUs that are not here: it fits, and keeps in registers what it works on."""

import pytest

from tests.fused.aot import kernels_of
from trainstep.measure.profile.kernels import kernel_family

SHAPES = {"2.7B": (80, 10_000), "8B": (128, 151_936), "odd": (6, 101)}


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_a_models_shapes(capability) -> None:
    shapes = SHAPES if capability == 90 else {"8B": SHAPES["8B"]}
    for model, shape in shapes.items():
        for name, kernel in kernels_of(*shape).items():
            compiled = kernel.compile(capability, "bf16")
            assert "st.global" in compiled.ptx, (model, name)
            assert compiled.spilled_bytes == 0, (model, name)
            assert compiled.shared_bytes <= 48 * 1024, (model, name)


def test_float32_and_the_widest_rows() -> None:
    for name, kernel in kernels_of(256, 300_000).items():
        compiled = kernel.compile(90, "fp32")
        assert "st.global" in compiled.ptx, name


def test_profiles_know_them() -> None:
    """By names that no other kernel of ours has."""
    named = {name: each.kernel.fn.__name__ for name, each in kernels_of(16, 100).items()}
    families = {name: kernel_family(kernel) for name, kernel in named.items()}
    losses = dict.fromkeys(("loss, gradient False", "loss, gradient True"), "softmax")
    assert families == {"rope": "elementwise"} | losses
    assert len(set(named.values())) == 2
