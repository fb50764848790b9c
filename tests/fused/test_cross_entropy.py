"""The head's product joined with its loss: value and gradients, chunks, ignored and impossible targets, NaN, hooks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.fused.places import DEVICE, DTYPES, HERE, Products, draw
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.check.fused import check
from trainstep.fused import cross_entropy as module
from trainstep.fused import eager, linear_cross_entropy, one_piece
from trainstep.fused.cross_entropy import LOGITS_BYTES, MULTIPLE, launch_loss, loss_op, tokens_at_once
from trainstep.fused.triton.cross_entropy import launch_targets

pytestmark = HERE
NAMES = ("loss", "dhidden", "dweight")


class Head(nn.Module):
    """A head that multiplies by the weight given."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.__dict__["weight"] = weight  # no parameter, so that it stays the leaf it is


def fused(chunk_tokens, ignore_index=-100, reduction="mean"):
    def loss(hidden, weight, targets):
        return linear_cross_entropy(
            *(hidden, Head(weight), targets), chunk_tokens=chunk_tokens, ignore_index=ignore_index, reduction=reduction
        )

    return loss


def ids(*shape, n_vocab, seed=3):
    return torch.randint(n_vocab, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "n_vocab", "chunk"),
    [
        ((1, 8), 1, 1),
        ((3, 7, 24), 101, 5),
        ((16, 32), 128, 16),
        ((33, 8), 9001, 32),
        ((5, 8), 3008, 5),
        ((4, 8), 9300, 4),
    ],
)
def test_loss_and_gradients(shape, n_vocab, chunk, dtype) -> None:
    hidden, weight = draw(*shape, dtype=dtype, seed=1), draw(n_vocab, shape[-1], dtype=dtype, seed=2)
    targets = ids(*shape[:-1], n_vocab=n_vocab)
    budget = check(fused(chunk), eager.linear_cross_entropy, (hidden, weight, targets), NAMES)
    assert budget.is_right, str(budget)


@pytest.mark.parametrize("chunk", [5, 12])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 7, -1])
def test_ignored_targets_count_for_nothing(ignored, reduction, chunk) -> None:
    hidden, weight, targets = draw(12, 8, seed=1), draw(30, 8, seed=2), ids(12, n_vocab=30)
    targets[[0, 4, 5]] = ignored

    def oracle(*inputs):
        return eager.linear_cross_entropy(*inputs, ignore_index=ignored, reduction=reduction)

    own = fused(chunk, ignored, reduction)
    budget = check(own, oracle, (hidden, weight, targets), NAMES)
    assert budget.is_right, str(budget)
    dhidden, _ = torch.autograd.grad(own(hidden, weight, targets), (hidden, weight))
    assert not dhidden[[0, 4, 5]].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_that_is_divided_by_a_number_of_its_own(dtype) -> None:
    """As transformers divides it by the targets of all micro-batches."""
    hidden, weight, targets = draw(9, 8, dtype=dtype, seed=1), draw(30, 8, dtype=dtype, seed=2), ids(9, n_vocab=30)

    def divided(loss):
        return lambda *inputs: loss(*inputs) / torch.tensor(31, device=DEVICE)

    def oracle(*inputs):
        return eager.linear_cross_entropy(*inputs, reduction="sum")

    for chunk in (4, 9):
        budget = check(divided(fused(chunk, reduction="sum")), divided(oracle), (hidden, weight, targets), NAMES)
        assert budget.is_right, str(budget)


@pytest.mark.parametrize("n_vocab", [30, 31])
def test_all_ignored_is_as_in_torch(n_vocab) -> None:
    hidden, weight = draw(4, 8, seed=1), draw(n_vocab, 8, seed=2)
    targets = torch.full((4,), -100, device=DEVICE)
    for function in (fused(3), fused(4), fused(3, reduction="sum"), eager.linear_cross_entropy):
        loss = function(hidden, weight, targets)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        assert not any(bool(each.any()) for each in gradients)
    assert fused(3)(hidden, weight, targets).isnan()
    assert fused(4)(hidden, weight, targets).isnan()
    assert fused(3, reduction="sum")(hidden, weight, targets) == 0


@pytest.mark.parametrize("n_vocab", [30, 31])
def test_nan_and_infinity_make_the_loss_what_torch_makes_of_them(n_vocab) -> None:
    weight, targets = draw(n_vocab, 8, seed=2), ids(4, n_vocab=n_vocab)
    for bad in (float("nan"), float("inf")):
        hidden = draw(4, 8, seed=1, grad=False)
        hidden[2, 3] = bad
        for chunk in (3, 4):
            loss = fused(chunk)(hidden, weight, targets)
            assert loss.isnan()
            (dweight,) = torch.autograd.grad(loss, weight)
            assert dweight.isnan().any()
    hidden = draw(4, 8, seed=1, grad=False).abs()
    with torch.no_grad():
        weight[5] = float("-inf")  # a token that cannot be
    targets[:] = 6
    loss = fused(3)(hidden, weight, targets)
    torch.testing.assert_close(loss, eager.linear_cross_entropy(hidden, weight, targets))
    targets[:] = 5
    assert fused(3)(hidden, weight, targets) == float("inf")


@pytest.mark.parametrize("n_vocab", [30, 31])
@pytest.mark.parametrize("bad", [31, -1, 2**40])
def test_targets_out_of_range(n_vocab, bad) -> None:
    hidden, weight, targets = draw(4, 8, seed=1), draw(n_vocab, 8, seed=2), ids(4, n_vocab=n_vocab)
    targets[1] = bad
    if DEVICE == "cpu":  # on a GPU the assertion would end the process's use of it
        with pytest.raises(UsageError, match=f"targets from 0 to {n_vocab - 1} .*got {bad}, the first of 1 others"):
            fused(3)(hidden, weight, targets)
    logits, losses = (hidden @ weight.T).detach(), torch.empty(4, device=DEVICE)
    scales, fits = torch.empty(3, device=DEVICE), torch.empty((), dtype=torch.int32, device=DEVICE)
    launch_targets((targets, scales, fits), n_vocab, -100, True, False)
    assert not fits
    launch_loss((logits, targets, losses, scales), -100, True)
    for found in (losses, logits):
        assert found[1].isnan().all()
        assert found[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("n_vocab", [30, 31])
def test_logits_of_ten_thousand_stay_finite(n_vocab) -> None:
    hidden, weight, targets = draw(6, 8, seed=1), draw(n_vocab, 8, seed=2), ids(6, n_vocab=n_vocab)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    budget = check(fused(4), eager.linear_cross_entropy, (hidden, weight, targets), NAMES)
    assert budget.is_right, str(budget)


def test_no_gradient_that_is_not_wanted_is_computed(monkeypatch) -> None:
    hidden, head, targets = draw(6, 8, grad=False), nn.Linear(8, 30, bias=False, device=DEVICE), ids(6, n_vocab=30)
    with torch.no_grad():
        plain = linear_cross_entropy(hidden, head, targets)
    assert not plain.requires_grad
    linear_cross_entropy(hidden, head, targets).backward()
    assert head.weight.grad is not None
    head.weight.requires_grad_(False)
    monkeypatch.setattr(one_piece.LossInOnePiece, "forward", None)  # which computes them
    assert not linear_cross_entropy(hidden, head, targets).requires_grad
    monkeypatch.undo()
    leaf = draw(6, 8)
    linear_cross_entropy(leaf, head, targets).backward()
    expected = torch.autograd.grad(F.cross_entropy(head(leaf), targets), leaf)[0]
    torch.testing.assert_close(leaf.grad, expected)
    loss, _, dhidden, dweight = loss_op(hidden, head.weight, targets, -100, 4, True, False, False)
    assert (dhidden.numel(), dweight.numel()) == (0, 0)
    torch.testing.assert_close(loss, plain)


def test_logits_of_several_chunks_never_exist_in_full() -> None:
    """The largest products have a chunk's rows, and there are three of them for each chunk."""
    hidden, weight, targets = draw(12, 8, seed=1), draw(40, 8, seed=2), ids(12, n_vocab=40)
    with Products() as products:
        module._loss(hidden.detach(), weight.detach(), targets, -100, 4, True, True, True)
    assert sorted(products.shapes) == sorted([(4, 40), (4, 8), (40, 8)] * 3)
    loss = fused(4)(hidden, weight, targets)
    with Products() as products:
        loss.backward()
    assert products.shapes == [], "backward multiplies nothing"


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_in_one_piece_backward_has_a_product_for_each_gradient_that_is_wanted(wanted) -> None:
    hidden, weight = draw(12, 8, seed=1, grad=wanted[0]), draw(40, 8, seed=2, grad=wanted[1])
    loss = fused(12)(hidden, weight, ids(12, n_vocab=40))
    with Products() as products:
        loss.backward()
    assert products.shapes == [shape for shape, is_wanted in zip([(12, 8), (40, 8)], wanted, strict=True) if is_wanted]


@pytest.mark.parametrize("chunk", [4, 12])
def test_hidden_states_may_be_column_major(chunk) -> None:
    columns, weight, targets = draw(8, 12, seed=1), draw(41, 8, seed=2), ids(12, n_vocab=41)
    rows = columns.detach().T.contiguous().requires_grad_()
    found = []
    for hidden, leaf in ((columns.T, columns), (rows, rows)):
        loss = fused(chunk)(hidden, weight, targets)
        by_hidden, by_weight = torch.autograd.grad(loss, (leaf, weight))
        found.append([loss, by_hidden if leaf is rows else by_hidden.T, by_weight])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("chunk", [4, 12])
def test_compiled(chunk) -> None:
    hidden, weight, targets = draw(12, 8, seed=1), draw(40, 8, seed=2), ids(12, n_vocab=40)

    def loss(hidden, weight, targets):
        return module.weight_cross_entropy(hidden * 2, weight, targets, chunk_tokens=chunk) * 3

    found = []
    for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        value = function(hidden, weight, targets)
        found.append([value, *torch.autograd.grad(value, (hidden, weight))])
    torch.testing.assert_close(*found)


def test_with_a_head_it_breaks_the_graph_that_is_compiled() -> None:
    hidden, targets, head = draw(12, 8, seed=1), ids(12, n_vocab=40), nn.Linear(8, 40, bias=False, device=DEVICE)
    asked = []
    head.register_forward_pre_hook(lambda *_: asked.append(1))

    def loss(hidden):
        return linear_cross_entropy(hidden * 2, head, targets) * 3

    found = []
    for function in (torch.compile(loss, backend="aot_eager"), loss):
        value = function(hidden)
        found.append([value, *torch.autograd.grad(value, (hidden, head.weight))])
    torch.testing.assert_close(*found)
    assert len(asked) == 2
    assert "forward" not in vars(head)


@pytest.mark.parametrize(
    ("tokens", "n_vocab", "item_bytes", "chunk"),
    [
        (16_384, 10_000, 2, 16_384),  # small, in one piece
        (8192, 10_000, 2, 8192),
        (32_768, 151_936, 2, 4096),  # 8B, in eight of 4,352 at most
        (32_768, 151_936, 4, 2048),  # in float32, in sixteen
        (32_769, 151_936, 2, 4224),
        (100_003, 50_257, 2, 12_544),
        (2**26, 9, 4, 2**24),  # rows of 9 lie 16 apart
        (67_108, 10_000, 2, 67_108),  # one piece just fits
        (67_109, 10_000, 2, 33_664),
        (1, 10**10, 4, 1),  # a row is larger than the limit
        (50, 10**7, 4, 33),  # fewer than a multiple
        (7, 1, 2, 7),
    ],
)
def test_a_chunk_is_chosen_by_its_bytes(tokens, n_vocab, item_bytes, chunk) -> None:
    """As large as the limit allows; then no larger than as many chunks need."""
    assert tokens_at_once(tokens, n_vocab, item_bytes) == chunk
    most = LOGITS_BYTES // (-(-n_vocab // 16) * 16 * item_bytes)
    assert chunk <= max(1, most)
    if chunk > MULTIPLE and chunk < tokens:
        assert chunk % MULTIPLE == 0
        assert -(-tokens // chunk) == -(-tokens // (most - most % MULTIPLE)), "no more chunks than the limit makes"


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "rows"), [(9, [9]), (11, [4, 4, 3])], ids=str)
def test_unless_it_is_given(monkeypatch, tokens, rows, dtype) -> None:
    """Of a vocabulary of 23, whose rows lie 32 apart, and numbers of tokens that no chunk divides."""
    launched = []

    def seen(tensors, *rest):
        launched.append(len(tensors[0]))
        launch_loss(tensors, *rest)

    monkeypatch.setattr(module, "MULTIPLE", 2)
    monkeypatch.setattr(module, "LOGITS_BYTES", (9 if rows == [tokens] else 5) * 32 * dtype.itemsize + 1)
    monkeypatch.setattr(module, "launch_loss", seen)
    monkeypatch.setattr(one_piece, "launch_loss", seen)
    hidden, weight, targets = (
        draw(tokens, 8, dtype=dtype, seed=1),
        draw(23, 8, dtype=dtype, seed=2),
        ids(tokens, n_vocab=23),
    )
    budget = check(fused(None), eager.linear_cross_entropy, (hidden, weight, targets), NAMES)
    assert budget.is_right, str(budget)
    assert launched == rows


def test_under_autocast_its_bytes_are_those_of_the_cast(monkeypatch) -> None:
    head, hidden, targets = nn.Linear(8, 30, bias=False, device=DEVICE), draw(6, 8), ids(6, n_vocab=30)
    asked = []
    monkeypatch.setattr(module, "tokens_at_once", lambda *given: asked.append(given) or 6)
    with torch.autocast(DEVICE, torch.float16):
        linear_cross_entropy(hidden, head, targets)
    linear_cross_entropy(hidden, head, targets)
    assert asked == [(6, 30, 2), (6, 30, 4)]


def test_backward_a_second_time_is_an_error_not_a_wrong_gradient() -> None:
    hidden, weight, targets = draw(6, 8, seed=1), draw(30, 8, seed=2), ids(6, n_vocab=30)
    loss = fused(4)(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_one_piece_it_may_be_differentiated_again() -> None:
    hidden, weight, targets = draw(6, 8, seed=1), draw(30, 8, seed=2), ids(6, n_vocab=30)
    loss = fused(6)(hidden, weight, targets)
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_sums_over_many_tokens_stay_within_float16() -> None:
    """A gradient of the weight, before it is divided by the number of targets, goes beyond 65,504."""
    hidden, weight = (
        draw(256, 8, dtype=torch.float16, seed=1, grad=False) + 400,
        draw(9, 8, dtype=torch.float16, seed=2),
    )
    targets = torch.zeros(256, dtype=torch.int64, device=DEVICE)
    budget = check(fused(None), eager.linear_cross_entropy, (hidden.requires_grad_(), weight, targets), NAMES)
    assert budget.is_right, str(budget)
    (dweight,) = torch.autograd.grad(fused(None)(hidden, weight, targets), weight)
    assert 256 * dweight.float().abs().max() > 65_504


@pytest.mark.parametrize("chunk", [pytest.param(256, marks=pytest.mark.thorough), 512])
def test_gradients_of_a_float16_weight_are_scaled_after_their_sum(chunk) -> None:
    """softmax - onehot over a large number has a digit or two left in float16, and less than 2^-24 is nothing."""
    hidden = draw(512, 8, dtype=torch.float16, seed=1, grad=False) * 0.05
    weight, targets = draw(9, 8, dtype=torch.float16, seed=2), torch.zeros(512, dtype=torch.int64, device=DEVICE)
    found, exact = (
        torch.autograd.grad(function(x, w, targets) / 2**12, w)[0].double()
        for function, x, w in (
            (fused(chunk), hidden, weight),
            (eager.linear_cross_entropy, hidden.double(), weight.detach().double().requires_grad_()),
        )
    )
    torch.testing.assert_close(found, exact, rtol=2**-9, atol=2**-24)


def test_the_gradient_of_a_float32_weight_is_summed_in_float32() -> None:
    errors, states = draw(64, 9, dtype=torch.bfloat16, grad=False), draw(64, 8, dtype=torch.bfloat16, grad=False)
    found = one_piece._of_weight(errors, states, torch.float32)
    torch.testing.assert_close(found, errors.T.float() @ states.float(), rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients_are_an_error() -> None:
    hidden, weight, targets = draw(6, 8, seed=1), draw(30, 8, seed=2), ids(6, n_vocab=30)
    for chunk in (4, 6):
        with pytest.raises(UnsupportedError, match="no gradients of its gradients"):
            torch.autograd.grad(fused(chunk)(hidden, weight, targets), hidden, create_graph=True)


def test_the_weight_is_read_in_the_heads_own_forward() -> None:
    """As FSDP needs it: before it the weight is not there, and what comes out goes through the hooks."""
    head = nn.Linear(8, 30, bias=False, device=DEVICE)
    hidden, targets, whole, heard = draw(6, 8), ids(6, n_vocab=30), head.weight, []
    expected = F.cross_entropy(head(hidden), targets)
    head.weight = nn.Parameter(torch.empty(0, device=DEVICE))

    def gather(module, _):
        module.weight = whole

    def release(module, _, outputs):
        heard.append(outputs.shape)
        module.weight = nn.Parameter(torch.empty(0, device=DEVICE))

    head.register_forward_pre_hook(gather)
    head.register_forward_hook(release)
    loss = linear_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(loss, expected)
    assert heard == [()]
    assert "forward" not in vars(head), "the head is what it was"
    loss.backward()
    torch.testing.assert_close(whole.grad, torch.autograd.grad(expected, whole)[0])


def test_autocast_casts_as_for_products() -> None:
    """float16 products; the gradient of a float32 weight is not rounded to 16 bits on its way."""
    head = nn.Linear(8, 30, bias=False, device=DEVICE)
    hidden, targets = draw(6, 8), ids(6, n_vocab=30)
    dtype = torch.float16
    with torch.autocast(DEVICE, dtype):
        loss = linear_cross_entropy(hidden, head, targets)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, head.weight))
    assert (loss.dtype, dhidden.dtype, dweight.dtype) == (torch.float32,) * 3
    assert not torch.equal(dweight, dweight.to(dtype).float())
    rounded = [each.detach().to(dtype) for each in (hidden, head.weight)]
    exact, _, by_hidden, _ = loss_op(*rounded, targets, -100, 6, True, True, True)
    torch.testing.assert_close(loss, exact, rtol=0, atol=0)
    torch.testing.assert_close(dhidden, (by_hidden * (1 / 6)).float(), rtol=2**-10, atol=0)


def test_bad_inputs() -> None:
    hidden, targets = draw(6, 8), ids(6, n_vocab=30)
    head = nn.Linear(8, 30, bias=False, device=DEVICE)
    with pytest.raises(UnsupportedError, match="without bias"):
        linear_cross_entropy(hidden, nn.Linear(8, 30, device=DEVICE), targets)
    with pytest.raises(UnsupportedError, match="multiplies by its weight alone"):
        linear_cross_entropy(hidden, nn.Identity(), targets)
    with pytest.raises(UsageError, match="chunk_tokens is 0"):
        linear_cross_entropy(hidden, head, targets, chunk_tokens=0)
    with pytest.raises(UsageError, match='reduction is \'none\'; the fused loss has "mean" and "sum"'):
        linear_cross_entropy(hidden, head, targets, reduction="none")
    for states, rows, wanted in ((hidden[:, :7], 30, 6), (hidden, 30, 5), (hidden[:0], 30, 0), (hidden, 0, 6)):
        with pytest.raises(UsageError, match="a target for each row of hidden, none empty: got hidden"):
            module.weight_cross_entropy(states, head.weight[:rows], targets[:wanted])
    with pytest.raises(TypeError, match="targets as int64"):
        linear_cross_entropy(hidden, head, targets.int())
    with pytest.raises(TypeError, match="hidden and weight of one dtype"):
        linear_cross_entropy(hidden.half(), head, targets)


class Net(nn.Module):
    """A loss computed within forward, as sharded weights need it."""

    def __init__(self, chunk_tokens) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 30, bias=False)

    def forward(self, hidden, targets):
        return linear_cross_entropy(self.body(hidden), self.head, targets, chunk_tokens=self.chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [4, 6])
def test_under_torchs_fsdp2(chunk_tokens) -> None:
    """Whose hooks hold the head's weight as a DTensor outside of the head's forward."""
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        net, hidden, targets = Net(chunk_tokens).to(DEVICE), draw(6, 8), ids(6, n_vocab=30)
        expected = F.cross_entropy(net.head(net.body(hidden)), targets)
        gradients = torch.autograd.grad(expected, list(net.parameters()))
        mesh = dist.init_device_mesh(DEVICE, (1,))
        fully_shard(net.head, mesh=mesh)
        fully_shard(net, mesh=mesh)
        loss = net(hidden, targets)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
    finally:
        dist.destroy_process_group()
