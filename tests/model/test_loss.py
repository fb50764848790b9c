import pytest
import torch
from torch import nn

from trainstep.measure.memory import LiveStorages
from trainstep.model.loss import chunked_cross_entropy, cross_entropy


def setup(tokens=96, d_model=16, vocab=40):
    torch.manual_seed(0)
    hidden = torch.randn(2, tokens // 2, d_model, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(d_model, vocab, bias=False).double()
    return hidden, head, torch.randint(vocab, (2, tokens // 2))


def test_dense_against_the_formula():
    hidden, head, targets = setup()
    logits = head(hidden)
    log_probabilities = logits - logits.exp().sum(-1, keepdim=True).log()
    expected = -log_probabilities.gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, targets).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunk", [1, 7, 32, 96, 1000])
def test_chunked_equals_dense_with_gradients(chunk):
    hidden, head, targets = setup()
    cross_entropy(head(hidden), targets).backward()
    expected = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    loss = chunked_cross_entropy(hidden, head, targets, chunk_tokens=chunk)
    loss.backward()
    assert float(loss) == pytest.approx(float(cross_entropy(head(hidden), targets)), rel=1e-6)
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(head.weight.grad, expected[1], rtol=1e-5, atol=1e-9)


def test_chunked_never_holds_the_logits():
    hidden, head, targets = setup(tokens=512, vocab=1000)

    def peak(loss):
        with LiveStorages([hidden, head.weight, targets]) as live:
            loss().backward()
        hidden.grad = head.weight.grad = None
        return live.peak

    dense = peak(lambda: cross_entropy(head(hidden), targets))
    chunked = peak(lambda: chunked_cross_entropy(hidden, head, targets, chunk_tokens=32))
    assert chunked < dense / 4
