"""FLOPs of a step's mathematics, and FLOPs and bytes of operator calls, are those of pencil and paper."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from trainstep.measure.flops import Lists, Tensors, counted_flops, operator_cost

F, H = "float", "c10::BFloat16"


def tensors(*pairs, scalars=(), counts=None):
    shapes, dtypes = zip(*pairs, strict=True) if pairs else ((), ())
    return Tensors(shapes, dtypes, counts or (1,) * len(pairs), scalars=scalars)


QKV = [((2, 3, 16, 8), H)] * 3
Q_BYTES = 2 * 3 * 16 * 8 * 2
STRIDED = ("", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1")
BOTH = ("", "", "", "[0]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]")
FIRST = (*BOTH[:-1], "[False, True, False]")
FORWARD = 4 * 2 * 3 * 16 * 16 * 8


@pytest.mark.parametrize(
    ("name", "arguments", "flops", "moved"),
    [
        ("aten::mm", tensors(((8, 4), F), ((4, 2), F)), 128, 4 * (32 + 8 + 16)),
        ("aten::mm", tensors(((8, 4), H), ((4, 2), H), ((8, 2), H)), 128, 2 * (32 + 8 + 16)),
        ("aten::bmm", tensors(((3, 8, 4), F), ((3, 4, 2), F)), 384, 3 * 4 * (32 + 8 + 16)),
        ("aten::addmm", tensors(((2,), F), ((8, 4), F), ((4, 2), F)), 128, 4 * (2 + 32 + 8 + 16)),
        ("aten::_grouped_mm", tensors(((12, 4), H), ((3, 4, 2), H), ((3,), "int")), 192, 2 * (48 + 24 + 24)),
        ("aten::_grouped_mm", tensors(((4, 12), F), ((12, 2), F), ((3,), "int")), 192, 4 * (48 + 24 + 24)),
        ("aten::_grouped_mm", tensors(((3, 5, 4), F), ((4, 12), F), ((3,), "int")), 480, 4 * (60 + 48 + 60)),
        ("aten::mkldnn_convolution", tensors(((2, 4, 9, 9), F), ((6, 4, 3, 3), F), scalars=STRIDED),
         2 * 2 * 6 * 5 * 5 * 4 * 9, 4 * (2 * 4 * 81 + 6 * 36 + 2 * 6 * 25)),
        ("aten::convolution_backward", tensors(((2, 6, 5, 5), F), ((2, 4, 9, 9), F), ((6, 4, 3, 3), F), scalars=BOTH),
         2 * 2 * 2 * 6 * 5 * 5 * 4 * 9, 4 * (2 * 6 * 25 + 2 * (2 * 4 * 81 + 6 * 36))),
        ("aten::convolution_backward", tensors(((2, 6, 5, 5), F), ((2, 4, 9, 9), F), ((6, 4, 3, 3), F), scalars=FIRST),
         2 * 2 * 6 * 5 * 5 * 4 * 9, 4 * (2 * 6 * 25 + 2 * 4 * 81 + 2 * 6 * 36)),
        ("aten::_softmax", tensors(((4, 10), F)), 200, 320),
        ("aten::_softmax_backward_data", tensors(((4, 10), F), ((4, 10), F)), 160, 480),
        ("aten::mul", tensors(((4, 10), F), ((10,), F)), 40, 160 + 40 + 160),
        ("aten::add_", tensors(((4, 10), H), ((4, 10), H)), 40, 3 * 80),
        ("aten::copy_", tensors(((4, 10), H), ((4, 10), F)), None, 80 + 160),
        ("aten::fill_", tensors(((4, 10), F)), None, 160),
        ("aten::sum", tensors(((4, 10), F)), 40, 160),
        ("aten::_foreach_add_", tensors(*[((5,), "TensorList")] * 4, counts=(2, 2)), 10, 6 * 5 * 4),
        ("aten::_fused_adamw_", tensors(*[((5,), "TensorList")] * 4, counts=(1, 1, 1, 1)), 60, 28 * 5),
        ("triton_poi_fused_mul_0", tensors(((4, 10), F), ((4, 10), F)), None, 320),
        ("aten::_scaled_dot_product_flash_attention", tensors(*QKV, scalars=("", "", "", "0.", "False", "False", "")),
         FORWARD, 4 * Q_BYTES),
        ("aten::_scaled_dot_product_flash_attention", tensors(*QKV, scalars=("", "", "", "0.", "True", "False", "")),
         FORWARD / 2, 4 * Q_BYTES),
        ("aten::_scaled_dot_product_efficient_attention",
         tensors(*QKV, scalars=("", "", "", "", "True", "0.", "False", "")), FORWARD, 4 * Q_BYTES),
        ("trainstep::flash_attention_forward", tensors(*QKV, scalars=("", "", "", "True", "0.1")), FORWARD / 2,
         4 * Q_BYTES),
        ("aten::_scaled_dot_product_flash_attention_backward",
         tensors(QKV[0], *QKV, QKV[0], ((2, 3, 16), F), scalars=("",) * 6 + ("0.", "True")), 2.5 * FORWARD / 2,
         5 * Q_BYTES + 2 * 3 * 16 * 4 + 3 * Q_BYTES),
    ],
)  # fmt: skip
def test_costs(name, arguments, flops, moved):
    cost = operator_cost(name, arguments)
    assert cost is not None
    assert (cost.flops, cost.bytes) == (flops, moved)


def test_lists_have_the_parameters_dtype():
    two = operator_cost("aten::_foreach_sqrt", tensors(((5,), "TensorList"), counts=(1,)), Lists(element_bytes=2))
    assert two is not None
    assert two.bytes == 2 * 5 * 2


def test_lists_whose_shapes_are_not_recorded_are_the_optimizer_s_parameters():
    three = Tensors((), (), unknown_lists=3, scalars=("", "", "", "0.05"))
    known = Lists(element_bytes=4, elements=100)
    assert operator_cost("aten::_foreach_addcmul_", three) is None
    moved = operator_cost("aten::_foreach_addcmul_", three, known)
    assert moved is not None
    assert moved.bytes == 4 * 4 * 100
    fused = operator_cost("aten::_fused_adamw_", Tensors((), (), unknown_lists=6), known)
    assert fused is not None
    assert fused.bytes == 28 * 100
    for scalars in (("", "1"), ("", "1.")):
        steps = Tensors((), (), unknown_lists=1, scalars=scalars)
        assert operator_cost("aten::_foreach_add_", steps, known) is None, "it counts the steps"
    assert operator_cost("aten::cat", Tensors((), (), unknown_lists=1), known) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten::view", tensors(((4, 10), F))),
        ("aten::mm", None),
        ("aten::mm", tensors()),
        ("aten::mm", tensors(((8, 4), F))),
        ("aten::mul", tensors(((4, 10), "c10::Unheard"))),
        ("aten::_scaled_dot_product_flash_attention", tensors(*QKV)),
    ],
)
def test_what_is_unknown_is_not_counted(name, arguments):
    assert operator_cost(name, arguments) is None


def flops_of(forward, *inputs):
    """Of forward, and of forward and backward."""
    with counted_flops() as count:
        output = forward(*inputs)
        forward_alone = count()
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        return forward_alone, count()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_a_cpu(causal):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    forward = 4 * 2 * 3 * 16 * 16 * 8 // (2 if causal else 1)
    assert flops_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)) == (forward, 3 * forward)


@pytest.mark.parametrize("directions", [1, 2])
def test_an_lstm(directions):
    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=directions == 2)
    x = torch.randn(5, 3, 8, requires_grad=True)
    forward = 2 * 5 * 3 * directions * 4 * 16 * (8 + 16 + directions * 16 + 16)
    assert flops_of(layer, x) == (forward, 3 * forward)


def test_a_gru_which_a_cpu_runs_product_by_product():
    x = torch.randn(5, 3, 8, requires_grad=True)
    forward = 2 * 5 * 3 * 3 * 16 * (8 + 16)
    start = 2 * 3 * 3 * 16 * 16  # the zeros it starts from need no gradient
    assert flops_of(nn.GRU(8, 16), x) == (forward, 3 * forward - start)


def written_out(mask):
    """Attention as models write it: two products and a softmax."""
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))

    def attend():
        scores = q @ k.transpose(-1, -2) / 8**0.5
        return torch.softmax(scores + mask, -1) @ v

    return flops_of(attend)


LOWER = torch.full((16, 16), torch.finfo(torch.float32).min).triu(1)


@pytest.mark.parametrize(("mask", "halves"), [(torch.zeros(16, 16), 1), (LOWER, 2), (LOWER.flip(1), 1)])
def test_attention_that_is_written_out(mask, halves):
    """A model that computes all scores counts as one whose kernel leaves half of them out: both are the same maths."""
    assert written_out(mask) == (FULL // halves, 3 * FULL // halves)


FULL = 4 * 2 * 3 * 16 * 16 * 8


def test_only_scores_that_are_causal_count_as_half():
    """One layer of two is causal; products of other shapes are whole."""
    q, k, v = (torch.randn(6, 16, 8, requires_grad=True) for _ in range(3))
    weight = torch.randn(6, 8, 8, requires_grad=True)

    def layers():
        whole = torch.softmax(q @ k.mT, -1) @ v
        causal = torch.softmax(whole @ k.mT + LOWER, -1) @ v
        return causal @ weight

    forward = FULL + FULL // 2 + 2 * 6 * 16 * 8 * 8
    assert flops_of(layers) == (forward, 3 * forward)


@pytest.mark.parametrize(
    ("mask", "halves"),
    [(LOWER == 0, 2), (LOWER, 2), (torch.ones(16, 16, dtype=torch.bool), 1), (torch.rand(2, 1, 1, 16) > 0.3, 1)],
)
def test_attention_with_a_mask(mask, halves):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    found = flops_of(lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert found == (FULL // halves, 3 * FULL // halves)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_its_mathematical_form(causal):
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = flops_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal))
    assert found == (FULL // (1 + causal), 3 * FULL // (1 + causal))


@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_in_groups(groups, transposed):
    """Depthwise is as many groups as channels: torch's counter takes its backward for that of all channels with all."""
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    layer = kind(16, 16, 4, groups=groups, stride=2)
    x = torch.randn(2, 16, 20, requires_grad=True)
    positions = 20 if transposed else 9
    forward = 2 * 2 * positions * 16 * 16 // groups * 4
    assert flops_of(layer, x) == (forward, 3 * forward)
    assert flops_of(layer, x.detach())[1] == 2 * forward, "inputs without a gradient need no product for it"


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_a_grouped_product():
    x, weight = torch.randn(32, 16, requires_grad=True), torch.randn(4, 16, 24, requires_grad=True)
    ends = torch.tensor([8, 8, 20, 32], dtype=torch.int32)
    forward = 2 * 32 * 16 * 24
    assert flops_of(lambda: torch._grouped_mm(x, weight, offs=ends).square()) == (forward, 3 * forward)


@torch.library.custom_op("flops_test::their_product", mutates_args=())
def their_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def test_operators_that_are_in_no_table_are_named():
    with counted_flops() as count:
        their_product(torch.ones(4, 4), torch.ones(4, 4))
        torch.ones(4, 4).mm(torch.ones(4, 4)).softmax(-1).add(1)
    assert count.uncounted == ("flops_test::their_product",)
    with counted_flops() as count:
        nn.functional.layer_norm(torch.ones(2, 4), (4,)).exp().matmul(torch.ones(4))
    assert count.uncounted == ()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_on_a_gpu(kind):
    layer = kind(8, 16, num_layers=2).cuda()
    x = torch.randn(5, 3, 8, device="cuda", requires_grad=True)
    weights = (4 if kind is nn.LSTM else 3) * 16 * (8 + 16 + 16 + 16)
    assert flops_of(layer, x) == (2 * 5 * 3 * weights, 3 * 2 * 5 * 3 * weights)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_causal_attention_counts_as_half_on_a_gpu(backend):
    q, k, v = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        found = flops_of(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    forward = 2 * 2 * 4 * 64 * 64 * 64
    assert found == (forward, 3 * forward)
