"""Every kernel compiled for GPUs that are not here: it fits, and keeps in registers what it works on."""

import pytest

from tests.fused.aot import kernels_of
from trainstep.fused.triton.cross_entropy import block_for, halves, is_whole
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


@pytest.mark.parametrize("n_vocab", [36_000, 50_257])
def test_eight_logits_of_a_thread_share_a_rescaling(n_vocab) -> None:
    """In registers, read 16 bytes at once whatever the vocabulary: no thread hands any to another."""
    kernel = kernels_of(16, n_vocab)["loss, gradient False"]
    compiled, of_a_thread = kernel.compile(90, "bf16"), kernel.constants["BLOCK"] // (32 * kernel.warps)
    assert "ld.global.v4" in compiled.ptx
    assert of_a_thread < compiled.ptx.count("ex2.") <= of_a_thread * 9 / 8 + 1, "and once for all of the row"
    of_a_row = 2 * (5 + 4)  # two sums or maxima over 32 lanes, and over the warps
    assert compiled.ptx.count("shfl.") <= of_a_row


@pytest.mark.parametrize("n_vocab", [10_000, 9999])
def test_of_a_whole_row_each_exponential_is_computed_once(n_vocab) -> None:
    kernel = kernels_of(16, n_vocab)["loss, gradient True"]
    compiled, of_a_thread = kernel.compile(90, "bf16"), sum(halves(n_vocab)) // (32 * kernel.warps)
    assert "ld.global.v4" in compiled.ptx
    assert "st.global.v4" in compiled.ptx
    assert compiled.ptx.count("ex2.") == of_a_thread
    assert compiled.spilled_bytes == 0


@pytest.mark.parametrize(
    ("n_vocab", "is_held"),
    [(1, False), (2, True), (30, False), (31, True), (4095, True), (9216, True), (9217, False), (10_000, True),
     (10_240, True), (10_241, False), (16_384, False), (50_257, False)],
)  # fmt: skip
def test_rows_are_held_whole_where_that_wastes_little(n_vocab, is_held) -> None:
    first, rest = halves(n_vocab)
    assert is_whole(n_vocab) is is_held
    assert n_vocab == 1 or first < n_vocab <= first + rest
    assert not is_held or first + rest - n_vocab <= n_vocab / 16


@pytest.mark.parametrize(
    ("n_vocab", "block"),
    [(5, 8), (300, 512), (513, 1024), (1500, 2048), (10_000, 2048), (50_257, 4096), (151_936, 8192)],
)
def test_a_block_goes_little_beyond_a_row(n_vocab, block) -> None:
    assert block_for(n_vocab) == block
    assert -n_vocab % block <= n_vocab / 16 or n_vocab < 2048


def test_float32_and_the_widest_rows() -> None:
    for name, kernel in kernels_of(256, 300_000).items():
        compiled = kernel.compile(90, "fp32")
        assert "st.global" in compiled.ptx, name


@pytest.mark.parametrize("n_vocab", [100, 128])
def test_profiles_know_them(n_vocab) -> None:
    """By names that no other kernel of ours has."""
    named = {name: each.kernel.fn.__name__ for name, each in kernels_of(16, n_vocab).items()}
    families = {name: kernel_family(kernel) for name, kernel in named.items()}
    losses = dict.fromkeys(("loss, gradient False", "loss, gradient True"), "softmax")
    turns = dict.fromkeys(("rope", "rope, grouped"), "elementwise")
    assert families == {**turns, "scale": "elementwise", "targets": "reduction"} | losses
    assert len(set(named.values())) == 4
