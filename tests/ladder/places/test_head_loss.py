"""A head's loss is joined with it where that is certain, and left as it is everywhere else: always the same numbers and
gradients."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from tests.ladder.places.heads import BATCH, IDS, LENGTH, WIDTH, WORDS, Model, finder_in, model_of, plain, seen_by
from trainstep.base.errors import UnsupportedError
from trainstep.ladder.places.logits import COMPUTED_TOO, Logits

SOME = IDS.clone()
SOME[0, :3] = -100


@pytest.fixture
def found(monkeypatch):
    return finder_in(monkeypatch)


def nanogpt(model, logits):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), SOME.view(-1), ignore_index=-100)


def shifted(model, logits):
    return nn.CrossEntropyLoss()(logits[..., :-1, :].contiguous().view(-1, WORDS), SOME[..., 1:].reshape(-1))


def transformers(model, logits):
    labels = F.pad(SOME, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.double().view(-1, WORDS), labels.view(-1), ignore_index=-100, reduction="sum")
    return loss / torch.tensor(17)


def second(model, logits):
    return F.cross_entropy(logits.transpose(1, 2), SOME)


def permuted(model, logits):
    return F.cross_entropy(torch.permute(logits[:, 1:], (0, 2, 1)).contiguous(), SOME[:, 1:])


def other_index(model, logits):
    return F.cross_entropy(logits.reshape(-1, WORDS), IDS.reshape(-1), ignore_index=int(IDS[0, 0]))


def masked(model, logits):
    shown = SOME != -100
    return F.cross_entropy(logits[shown], SOME[shown])


def last(model, logits):
    return F.cross_entropy(logits[:, -1], IDS[:, -1])


def looked_at_later(model, logits):
    loss = plain(model, logits)
    assert logits.argmax(-1).shape == IDS.shape
    return loss + 0.1 * logits.logsumexp(-1).square().mean()


def returned(model, logits):
    """As transformers returns them."""
    output = {"loss": plain(model, logits), "logits": logits}
    return {name: value for name, value in output.items() if value is not None}["loss"]


def twice(model, logits):
    return plain(model, logits) + 2 * second(model, logits)


def smoothed(model, logits):
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten(), label_smoothing=0.1)


def weighted(model, logits):
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten(), weight=torch.linspace(0, 1, WORDS).double())


def each(model, logits):
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten(), reduction="none").square().sum()


def legacy(model, logits):
    with pytest.warns(UserWarning, match="size_average"):
        return F.cross_entropy(logits.flatten(0, 1), IDS.flatten(), size_average=False)


def soft(model, logits):
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(IDS.flatten(), WORDS).double() * 0.9)


def capped(model, logits):
    return plain(model, torch.tanh(logits / 30) * 30)


def scaled(model, logits):
    return plain(model, logits * 0.3)


def changed_in_place(model, logits):
    logits[..., 0] = 0.0
    return plain(model, logits.mul_(2))


def fewer_words(model, logits):
    return F.cross_entropy(logits[..., :WORDS].flatten(0, 1) + logits[..., WORDS - 1 :].flatten(0, 1), IDS.flatten())


def padded_words(model, logits):
    """Of a vocabulary that was made larger for the products' sake."""
    return F.cross_entropy(logits[..., :5].flatten(0, 1), IDS.flatten() % 5)


def padded_third(model, logits):
    return F.cross_entropy(logits[:, :, :5].flatten(0, 1), IDS.flatten() % 5)


def chosen_words(model, logits):
    return F.cross_entropy(logits[:, :, [0, 1, 2]].flatten(0, 1), IDS.flatten() % 3)


def tensor_of_words(model, logits):
    return F.cross_entropy(logits[:, :, torch.arange(3)].flatten(0, 1), IDS.flatten() % 3)


def other_classes(model, logits):
    """Of three dimensions the second has the classes: these are as many as tokens."""
    return F.cross_entropy(logits, IDS.new_zeros(BATCH, WORDS))


def narrower(model, logits):
    return plain(model, logits.float()).double()


def gathered(model, logits):
    return -logits.log_softmax(-1).gather(-1, IDS[..., None]).mean()


def kept(model, logits):
    logits.retain_grad()
    (gradient,) = torch.autograd.grad(plain(model, logits), logits, retain_graph=True)
    return plain(model, logits) + (gradient.detach().square() * logits).sum()


def hooked(model, logits):
    logits.register_hook(lambda gradient: 2 * gradient)
    return plain(model, logits)


def first_looked_at(model, logits):
    with torch.no_grad():
        assert logits.argmax(-1).shape == IDS.shape
    return plain(model, logits)


def detached(model, logits):
    loss = plain(model, logits)
    return loss + (logits.detach() * logits.data).mean() + F.linear(logits, torch.ones(1, WORDS).double()).mean()


class Doubled(torch.autograd.Function):
    """Somebody's own, which torch calls past its functions."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits * 2 * logits

    @staticmethod
    def backward(ctx, gradient):
        return 4 * ctx.saved_tensors[0] * gradient


def own_function(model, logits):
    return Doubled.apply(logits).mean() + Doubled.apply(logits[:, 1:].float().double()).mean()


def past_functions(model, logits):
    """As C++ code uses tensors; and the loss after it."""
    with torch._C.DisableTorchFunctionSubclass():
        also = (logits * 2).square().mean()
    return plain(model, logits) + also


def pickled(model, logits):
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), copy.deepcopy(logits.detach()))
    assert "tensor(" in repr(logits)
    return plain(model, logits)


JOINED = {
    **dict.fromkeys((plain, nanogpt, shifted, transformers, second, permuted, other_index, masked, last, returned), 1),
    **dict.fromkeys((looked_at_later, detached), 1),
    twice: 2,
}
LEFT = (
    *(smoothed, weighted, each, legacy, soft, capped, scaled, changed_in_place, fewer_words, other_classes, narrower),
    *(padded_words, padded_third, chosen_words, tensor_of_words),
    *(gathered, kept, hooked, first_looked_at, own_function, past_functions, pickled),
)
MODELS = ({}, {"bias": True}, {"is_tied": True}, {"is_embedding": True})


def trained(model, call, steps=1):
    """Losses and gradients of a few steps."""
    results = []
    for _ in range(steps):
        model.zero_grad()
        loss = call(model, model(IDS))
        loss.backward()
        assert type(loss) is torch.Tensor
        given = [each.grad for each in model.parameters()]
        results += [loss.detach(), *(each for each in given if each is not None)]
    return results


@pytest.mark.parametrize("options", MODELS, ids=str)
@pytest.mark.parametrize("call", [*JOINED, *LEFT], ids=lambda call: call.__name__)
def test_numbers_and_gradients_are_those_of_the_script(call, options, found):
    expected = trained(model_of(**options), call, steps=2)
    model = seen_by(found, model_of(**options))
    own = trained(model, call, steps=2)
    for one, other in zip(own, expected, strict=True):
        assert (type(one), one.dtype) == (torch.Tensor, torch.float64)
        torch.testing.assert_close(one, other, rtol=1e-6 if call is narrower else 1e-10, atol=1e-12)
    joined = [how for how in found.notes if how != COMPUTED_TOO]
    assert len(joined) == 2 * JOINED.get(call, 0), "in each of two steps"
    assert (COMPUTED_TOO in found.notes) == (call in (looked_at_later, detached))


def test_what_is_joined_keeps_no_logits(found):
    model = seen_by(found, model_of())
    logits = model(IDS)
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((BATCH, LENGTH, WORDS), torch.float64, True)
    assert isinstance(logits, Logits)
    plain(model, logits).backward()
    assert logits.product.value is None
    later = logits.argmax(-1)
    assert torch.equal(later, model.head(torch.tanh(model.body(model.embed(IDS)))).as_written().argmax(-1))


def test_evaluation_and_a_copy_of_the_model_are_plain(found):
    model = seen_by(found, model_of())
    with torch.no_grad():
        assert type(model(IDS)) is torch.Tensor
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.weight.mul_(2)
    assert type(other(IDS)) is torch.Tensor
    torch.testing.assert_close(other(IDS), 2 * model(IDS))


@pytest.mark.parametrize(
    "ask", [lambda logits, loss: logits.retain_grad(), lambda logits, loss: torch.autograd.grad(loss, [logits])]
)
def test_gradients_that_were_not_kept_are_refused(ask, found):
    model = seen_by(found, model_of())
    logits = model(IDS)
    loss = plain(model, logits)
    with pytest.raises(UnsupportedError, match="asks for gradients of logits after their loss"):
        ask(logits, loss)


@pytest.mark.parametrize("is_inside", [True, False])
def test_autocast_gives_the_dtypes_that_it_gives(is_inside, found):
    def of(model):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(IDS)
            loss = plain(model, logits) if is_inside else None
        loss = plain(model, logits.float()) if loss is None else loss
        loss.backward()
        return logits.dtype, loss.dtype, loss, *(each.grad for each in model.parameters())

    expected = of(model_of().float())
    model = seen_by(found, model_of().float())
    own = of(model)
    assert own[:2] == expected[:2] == (torch.bfloat16, torch.float32)
    for one, other in zip(own[2:], expected[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.002)
    assert found.notes == ["in chunks, by torch"]


@pytest.mark.parametrize("call", [plain, shifted, transformers])
def test_a_model_in_16_bits_has_losses_in_the_scripts_dtype(call, found):
    expected = trained(model_of().bfloat16(), call)
    model = seen_by(found, model_of().bfloat16())
    own = trained(model, call)
    is_wide = call is transformers
    assert own[0].dtype == expected[0].dtype == (torch.float64 if is_wide else torch.bfloat16)
    assert found.notes == ([] if is_wide else ["in chunks, by torch"])
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.002)


@pytest.mark.parametrize("widen", [lambda logits: logits.double(), lambda logits: logits.float().to(torch.float64)])
def test_a_loss_in_float64_of_logits_in_float32_is_the_scripts(widen, found):
    def of(model):
        loss = plain(model, widen(model(IDS)))
        loss.backward()
        return [loss.detach(), *(each.grad for each in model.parameters())]

    expected = of(model_of().float())
    model = seen_by(found, model_of().float())
    torch.testing.assert_close(of(model), expected, rtol=0, atol=0)
    assert found.notes == []


def test_hooks_of_modules_and_checkpoints_have_their_gradients(found):
    from torch.utils.checkpoint import checkpoint

    def of(model, is_hooked, is_reentrant):
        hidden = torch.tanh(model.body(model.embed(IDS)))
        handle = model.head.register_full_backward_hook(lambda *_: None) if is_hooked else None
        loss = checkpoint(lambda x: plain(model, model.head(x)), hidden, use_reentrant=is_reentrant)
        loss.backward()
        if handle:
            handle.remove()
        return [each.grad for each in model.parameters()]

    for is_hooked, is_reentrant in ((True, False), (False, False), (False, True)):
        expected = of(model_of(), is_hooked, is_reentrant)
        model = seen_by(found, model_of())
        torch.testing.assert_close(of(model, is_hooked, is_reentrant), expected)
        assert ("in chunks, by torch" in found.notes) is not is_hooked
        found.notes.clear()


def test_forward_mode_ad_is_the_scripts(found):
    model = model_of()
    x = torch.linspace(-1, 1, BATCH * LENGTH * WIDTH).double().view(BATCH, LENGTH, WIDTH)

    def tangent():
        with forward_ad.dual_level():
            loss = plain(model, model.head(forward_ad.make_dual(x, x.cos())))
            return forward_ad.unpack_dual(loss).tangent

    expected = tangent()
    found.see_model(model)
    assert torch.equal(tangent(), expected)
    assert isinstance(model.head(x), Logits)


def test_a_layer_that_is_last_is_a_head_of_tokens_and_no_classifier(found):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7))
    found.see_model(model)
    assert type(model(torch.randn(9, WIDTH))) is torch.Tensor
    logits = model(torch.randn(2, 9, WIDTH))
    assert isinstance(logits, Logits)
    F.cross_entropy(logits.view(-1, 7), torch.arange(18) % 7).backward()
    assert found.notes == ["in chunks, by torch"]
    assert type(model[0](torch.randn(2, 9, WIDTH))) is torch.Tensor


class Blocks(Model):
    """Of blocks as wide inside as the model has positions, with a table of distances in each. The head is a list's."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(4 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Embedding(WIDTH, 1))
            for _ in range(2)
        )
        self.heads = nn.ModuleList([self.head])

    def forward(self, ids):
        x = self.embed(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            inside = block[0](x)
            assert type(inside) is torch.Tensor
            x = x + block[2](block[1](inside))
        return self.head(x)


def test_layers_in_blocks_are_no_heads(found):
    model = Blocks()
    found.see_model(model)
    assert isinstance(model(IDS), Logits)


def test_a_weight_at_the_address_of_a_head_that_is_gone_is_none(found):
    model, other = model_of(), model_of()
    found.see_model(model)
    found._heads[id(other.head.weight)] = found._heads.pop(id(model.head.weight))
    assert type(other(IDS)) is torch.Tensor


def test_sharded_weights_are_left_alone(found):
    class FSDPModule:
        pass

    class Sharded(Model, FSDPModule):
        pass

    model = Sharded()
    found.see_model(model)
    assert type(model(IDS)) is torch.Tensor


@pytest.mark.parametrize("name", ["model", "loss"])
def test_a_compiled_model_is_left_to_the_compiler_and_a_compiled_loss_is_joined(name, found):
    torch.compiler.reset()
    expected = trained(model_of(), plain)
    model = seen_by(found, model_of())
    call = plain
    if name == "model":
        model.compile(backend="aot_eager")
    else:
        compiled = torch.compile(lambda logits: plain(None, logits), backend="aot_eager")

        def call(_, logits):
            return compiled(logits)

    torch.testing.assert_close(trained(model, call), expected)
    assert found.notes == ([] if name == "model" else ["in chunks, by torch"])
    torch.compiler.reset()
