"""FLOPs and bytes of operator calls are those of pencil and paper."""

import pytest

from trainstep.measure.costs import Lists, Tensors, operator_cost

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
        ("trainstep::flash_attention_forward", tensors(*QKV, scalars=("", "", "", "True", "0.1", "4", "", "")), None,
         4 * Q_BYTES),
        ("trainstep::flash_attention_forward",
         tensors(*QKV, ((2, 16), "int"), scalars=("", "", "", "False", "0.1", "", "", "", "True")),
         None, 4 * Q_BYTES + 2 * 16 * 4),
        ("trainstep::flash_attention_forward", tensors(*QKV, scalars=("", "", "", "True", "0.1", "", "", "2.0")),
         FORWARD / 2, 4 * Q_BYTES),
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
