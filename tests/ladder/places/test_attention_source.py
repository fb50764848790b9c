"""Attention that a source writes out becomes one call where that is certain, with the numbers that it had."""

import ast
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainstep.ladder.places.attention_source import with_fused_attention

HEADER = "import math\nimport torch\nfrom torch.nn import functional as F\n\n\n"
MINGPT = """\
def attention(self, q, k, v):
    T = q.size(-2)
    # causal self-attention
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
    att = F.softmax(att, dim=-1)  # probabilities
    att = self.attn_dropout(att)
    y = att @ v  # PRODUCT
    return y
"""
BERT = """\
def attention(self, q, k, v):
    attention_scores = torch.matmul(q, k.transpose(-1, -2))
    attention_scores = attention_scores / math.sqrt(self.size)
    attention_scores = attention_scores + self.mask
    attention_probs = torch.softmax(attention_scores, dim=-1)
    attention_probs = F.dropout(attention_probs, 0.0 if self.off else 0.1, self.attn_dropout.training)
    return torch.matmul(attention_probs, v)  # PRODUCT
"""
T5 = """\
def attention(self, q, k, v):
    scores = q @ k.mT
    scores += self.mask
    return self.attn_dropout(scores.softmax(-1)) @ v  # PRODUCT
"""
IN_ONE = """\
def attention(self, q, k, v):
    if True:
        return F.softmax((q @ k.transpose(2, 3)) / 4 * 2, -1) @ v  # PRODUCT
"""
FORMS = [(MINGPT, "is_causal=True"), (MINGPT, "attn_mask"), (BERT, "attn_mask"), (T5, "attn_mask"), (IN_ONE, "no mask")]


def rewritten(text, how, header=HEADER):
    text = header + text
    line = next(number for number, each in enumerate(text.splitlines(), start=1) if "PRODUCT" in each)
    return with_fused_attention(text, ast.parse(text), line, how)


def run(text):
    exec(text, found := {})
    torch.manual_seed(3)
    mask = torch.zeros(8, 8, dtype=torch.float64).masked_fill(torch.ones(8, 8).triu(1) > 0, -math.inf)
    buffers = {"bias": torch.ones(16, 16).tril()[None, None], "mask": mask}
    module = SimpleNamespace(**buffers, size=4, off=True, attn_dropout=nn.Dropout(0.5).eval())
    q, k, v = (torch.randn(2, 3, 8, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    return [result := found["attention"](module, q, k, v), *torch.autograd.grad(result.square().sum(), (q, k, v))]


@pytest.mark.parametrize(("text", "how"), FORMS, ids=[f"{number}-{how}" for number, (_, how) in enumerate(FORMS)])
def test_the_call_computes_the_same(text, how):
    new = rewritten(text, how)
    assert "softmax(" not in new
    assert "scaled_dot_product_attention(" in new
    assert max(map(len, new.splitlines())) <= 120
    for found, expected in zip(run(new), run(HEADER + text), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_it_says():
    assert rewritten(MINGPT, "is_causal=True, dropout_p=0.1") == HEADER + (
        "def attention(self, q, k, v):\n"
        "    T = q.size(-2)\n"
        "    # causal self-attention\n"
        "    y = F.scaled_dot_product_attention(\n"
        "        q,\n"
        "        k,\n"
        "        v,\n"
        "        dropout_p=self.attn_dropout.p if self.attn_dropout.training else 0.0,\n"
        "        is_causal=True,\n"
        "        scale=1.0 / math.sqrt(k.size(-1)),\n"
        "    )  # PRODUCT\n"
        "    return y\n"
    )


def test_what_drops_in_training_drops(monkeypatch):
    given = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **more: given.append(more) or q)
    exec(rewritten(MINGPT, "is_causal=True"), found := {})
    for training in (True, False):
        found["attention"](
            SimpleNamespace(attn_dropout=nn.Dropout(0.25).train(training)), *[torch.ones(1, 1, 2, 4)] * 3
        )
    assert [each["dropout_p"] for each in given] == [0.25, 0.0]


@pytest.mark.parametrize("header", ["import torch\n", "import torch, math\nimport torch.nn.functional as functional\n"])
def test_the_file_s_own_name_of_the_function_is_used(header):
    expected = "functional" if "functional" in header else "torch.nn.functional"
    assert f" {expected}.scaled_dot_product_attention" in rewritten(MINGPT, "is_causal=True", header)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return y", "    return y, att"),  # somebody reads the probabilities
        ("    y = att @ v", "    self.last = att\n    y = att @ v"),
        ("    att = F.softmax", "    k = k + 1\n    att = F.softmax"),  # k is another one at the product
        ("    att = F.softmax", "    if T > 1:\n        att = att + 1\n    att = F.softmax"),  # not always the same
        ("F.softmax(att, dim=-1)", "F.softmax(att.float(), dim=-1)"),
        ("F.softmax(att, dim=-1)", "F.softmax(att, dim=-1, dtype=torch.float32)"),
        ("F.softmax(att, dim=-1)", "torch.sigmoid(att)"),
        ("k.transpose(-2, -1)", "k.transpose(1, 2)"),
        ("k.transpose(-2, -1)", "self.w"),
        ('float("-inf")', "-1e4"),  # a mask of another kind, which attn_mask cannot say
        ("    att = self.attn_dropout(att)", "    att = self.attn_dropout(att); z = 1"),
        ("    att = att.masked_fill", "    att, z = att, 1\n    att = att.masked_fill"),
        ("y = att @ v  #", "y = (att @ v) + (att @ v)  #"),
        ("self.attn_dropout(att)", "F.dropout(att, 0.1, self.training, True)"),
        ("    att = (q @", "    T = att = (q @"),
    ],
)
def test_what_is_not_certain_is_left(old, new):
    assert old in MINGPT
    assert rewritten(MINGPT.replace(old, new), "attn_mask") is None


def test_a_mask_that_the_run_did_not_see_or_saw_in_several_forms():
    assert rewritten(MINGPT, "no mask") is rewritten(IN_ONE, "is_causal=True") is None, "source and run disagree"
    assert "attn_mask=~(" in rewritten(MINGPT, "several masks")


def test_line_ends_stay():
    text = (HEADER + MINGPT).replace("\n", "\r\n")
    found = with_fused_attention(text, ast.parse(text), 5 + 8, "is_causal=True")
    assert "\n" not in found.replace("\r\n", "")
    assert "scaled_dot_product_attention(\r\n" in found
