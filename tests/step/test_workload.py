import functools
import sys
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from trainstep.base.config import SIZES, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.step.batches import map_tensors
from trainstep.step.training_step import TrainingStep, build_step
from trainstep.step.workload import Workload, builtin_source, factory_source, resolve_device


def write_module(folder, monkeypatch, name, text):
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    sys.modules.pop(name, None)


def test_builtin_workloads_are_reproducible():
    source = builtin_source("tiny", SIZES["tiny"])
    step = StepConfig(batch=2, context=16)
    first, again = source.build(step), source.build(step)
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), again.module.parameters(), strict=True))
    assert torch.equal(next(iter(first.batches))[0], next(iter(again.batches))[0])


def test_a_context_longer_than_the_models():
    from dataclasses import replace

    source = builtin_source("short", replace(SIZES["tiny"], max_context=64))
    with pytest.raises(UsageError, match="context 65 is longer than the model's max_context 64"):
        source.build(StepConfig(context=65))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "expected package.module:factory"),
        ("examples/toy_model.py:workload", r"a file; expected a module's name, such as examples.toy_model:workload"),
        ("absent_module:f", "importing it failed: ModuleNotFoundError"),
        ("user_module:absent", "has no attribute 'absent'"),
        ("user_module:number", "number is a int, expected a function"),
    ],
)
def test_bad_specs(tmp_path, monkeypatch, spec, message):
    write_module(tmp_path, monkeypatch, "user_module", "number = 3\n")
    with pytest.raises(UsageError, match=message):
        factory_source(spec)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "returned a int, expected a trainstep.Workload"),
        ("return {}['model']", r"the factory failed: KeyError: 'model' \(user_factory.py:2\)"),
    ],
)
def test_bad_factories(tmp_path, monkeypatch, body, message):
    write_module(tmp_path, monkeypatch, "user_factory", f"def make():\n    {body}\n")
    with pytest.raises(UsageError, match=message):
        factory_source("user_factory:make").build(StepConfig())


def test_a_workload_fixes_its_own_batch(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, "user_fixed", "def make(): raise AssertionError('not reached')\n")
    with pytest.raises(UnsupportedError, match="fixes its own batch"):
        factory_source("user_fixed:make").build(StepConfig(batch=3))


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu0", "expected auto, cpu, cuda"), ("mps", "measures on cpu and cuda"), ("cuda:99", "this machine has")],
)
def test_bad_devices(name, message):
    with pytest.raises(UsageError, match=message):
        resolve_device(name)


def toy(batches=None, module=None, **parts):
    torch.manual_seed(0)
    data = torch.randn(3, 4, 8)
    return Workload(
        module=module or nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
        batches=[(x, x.sum(-1, keepdim=True)) for x in data] if batches is None else batches,
        **{
            "loss": lambda out, batch: nn.functional.mse_loss(out, batch[1]),
            "optimizer": functools.partial(torch.optim.AdamW, lr=0.1),
            **parts,
        },
    )


def test_a_step_is_what_plain_torch_does():
    workload, config = toy(), StepConfig(device="cpu")
    reference = toy()
    step = TrainingStep(workload, config)
    optimizer = torch.optim.AdamW(reference.module.parameters(), lr=0.1)
    for batch in list(reference.batches) * 2:  # the step starts a finite list again
        loss = nn.functional.mse_loss(reference.module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(step.next_batch()), loss.detach())
    for ours, theirs in zip(workload.module.parameters(), reference.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_modes_leave_the_weights_alone_unless_asked():
    step = TrainingStep(toy(), StepConfig(device="cpu"))
    before = [parameter.clone() for parameter in step.module.parameters()]
    assert step(step.next_batch(), mode="forward") is None
    assert step(step.next_batch(), mode="forward-backward") is not None
    assert all(torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in step.module.parameters())
    step(step.next_batch(), mode="step")
    assert not all(torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))


def test_phases_are_announced_in_order():
    from contextlib import contextmanager

    heard = []

    @contextmanager
    def listen(name):
        heard.append(name)
        yield

    step = TrainingStep(toy(), StepConfig(device="cpu"))
    step(step.next_batch(), phase=listen)
    assert heard == ["forward", "loss", "backward", "optimizer"]


class Watch(nn.Module):
    """Remembers what its linear layer saw and gave."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x):
        out = self.inner(x * self.table.to(x.dtype))
        self.seen = self.inner.weight.dtype, out.dtype
        return out


@pytest.mark.parametrize(
    ("precision", "weight", "output"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("bf16-pure", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precisions_are_what_they_say(precision, weight, output):
    step = TrainingStep(toy(module=Watch()), StepConfig(device="cpu", precision=precision))
    for _ in range(20):  # the fp16 scaler skips steps until its scale fits
        step(step.next_batch())
    assert step.module.seen == (weight, output)
    assert step.module.table.dtype == torch.float32
    state = next(iter(step.optimizer.state.values()))
    assert state["exp_avg"].dtype == weight


def test_fp16_gradients_are_unscaled_each_time_and_for_the_update_after_them():
    found = []
    for precision in ("fp32", "fp16"):
        step = TrainingStep(toy(), StepConfig(device="cpu", precision=precision))
        weight = step.module[0].weight
        for _ in range(2):
            step.gradients(step.next_batch())
            found.append(weight.grad.clone())
            step.optimizer.zero_grad()
        step.optimizer.register_step_pre_hook(lambda *_, weight=weight: found.append(weight.grad.clone()))
        step(step.next_batch())
    for plain, half in zip(found[:3], found[3:], strict=True):
        assert (half - plain).norm() / plain.norm() < 2e-3


def test_a_pass_that_overflows_in_fp16_leaves_no_trace_in_buffers():
    def buffers(precision, factor):
        torch.manual_seed(0)
        module, seen = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), []
        module.register_forward_hook(lambda *_: seen.append(1))
        batches, loss = [(torch.randn(4, 8),)], lambda out, batch: out.square().mean() * factor
        workload = Workload(module, batches, loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        step = TrainingStep(workload, StepConfig(device="cpu", precision=precision))
        step.gradients(step.next_batch())
        return module[1], len(seen)

    (plain, _), (found, passes) = buffers("fp32", 1), buffers("fp16", 100)
    assert passes > 1
    assert found.num_batches_tracked == 1
    assert torch.allclose(found.running_mean, plain.running_mean, atol=1e-3)


def test_tf32_is_not_pretended_on_a_cpu():
    with pytest.raises(UnsupportedError, match="tf32 needs an NVIDIA GPU"):
        TrainingStep(toy(), StepConfig(device="cpu", precision="tf32"))


def test_the_matmul_precision_is_put_back():
    torch.set_float32_matmul_precision("high")
    try:
        step = TrainingStep(toy(), StepConfig(device="cpu"))
        step(step.next_batch())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_users_optimizer_is_made_fused():
    step = TrainingStep(toy(), StepConfig(device="cpu", optimizer="adamw-fused"))
    assert type(step.optimizer) is torch.optim.AdamW
    assert step.optimizer.param_groups[0]["fused"] is True
    assert step.optimizer.param_groups[0]["lr"] == 0.1
    step(step.next_batch())


def test_an_optimizer_without_fused_form():
    workload = toy()
    workload.optimizer = functools.partial(torch.optim.Rprop, lr=0.1)
    with pytest.raises(UnsupportedError, match="Rprop has no fused"):
        TrainingStep(workload, StepConfig(device="cpu", optimizer="adamw-fused"))


def test_blocks_are_needed_to_compile_blocks():
    workload = toy(module=nn.Linear(8, 1))
    with pytest.raises(UnsupportedError, match="this module has none"):
        TrainingStep(workload, StepConfig(device="cpu", compile="blocks"))


@pytest.mark.parametrize("batches", [[], iter([])])
def test_empty_batches(batches):
    step = TrainingStep(toy(batches=batches), StepConfig(device="cpu"))
    with pytest.raises(UsageError, match="batches are empty"):
        step.next_batch()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, batch: float(out.detach().mean()), "returned a float; expected a tensor"),
        (lambda out, batch: {"loss": out.mean()}, "returned a dict; expected a tensor"),
        (lambda out, batch: out.square(), r"shape \(4, 1\); expected one element"),
        (lambda out, batch: out.detach().mean(), "depends on no parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_on(loss, message):
    step = TrainingStep(toy(loss=loss), StepConfig(device="cpu"))
    with pytest.raises(UsageError, match=message):
        step(step.next_batch())


def test_a_module_with_nothing_to_train():
    with pytest.raises(UsageError, match="nothing to train"):
        TrainingStep(toy(module=nn.Linear(8, 1).requires_grad_(False)), StepConfig(device="cpu"))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)}, "optimizer is a SGD; expected a func"),
        ({"batches": 5}, "batches are a int; expected a list"),
        ({"module": nn.Linear}, "module is a type; expected an nn.Module"),
    ],
)
def test_a_workload_of_the_wrong_parts(part, message):
    with pytest.raises(UsageError, match=message):
        toy(**part)


def test_a_factory_in_another_dtype_or_with_another_optimizer(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, "user_half", USER_MODEL + "def half():\n"
                 "    made = make()\n    made.module.half()\n    return made\n")  # fmt: skip
    with pytest.raises(UsageError, match=r"inner\.weight is float16; expected float32"):
        factory_source("user_half:half").build(StepConfig())
    assert factory_source("user_half:half").build(StepConfig(precision="bf16-pure")), "it casts all weights anyway"
    with pytest.raises(UnsupportedError, match="brings its own optimizer, so --optimizer sgd"):
        factory_source("user_half:make").build(StepConfig(optimizer="sgd"))


def test_tensors_anywhere_in_a_batch_are_mapped():
    one = torch.ones(1)
    mapped = map_tensors({"a": one, "b": [one, (one, "text")], "c": 3}, lambda tensor: tensor * 2)
    assert mapped == {"a": 2 * one, "b": [2 * one, (2 * one, "text")], "c": 3}


Pair = namedtuple("Pair", "inputs targets")


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    name: str = "text"


class Encoding(UserDict):
    """As tokenizers return it: a mapping that is no dict, its items read as attributes."""

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (Pair(torch.ones(1), 2), lambda batch: batch.inputs),
        (Sample(torch.ones(1)), lambda batch: batch.tokens),
        (Encoding(input_ids=torch.ones(1)), lambda batch: batch.input_ids),
        (OrderedDict(x=[torch.ones(1)]), lambda batch: batch["x"][0]),
        (defaultdict(list, x=torch.ones(1)), lambda batch: batch["x"]),
    ],
)
def test_a_batch_stays_of_its_class(batch, read):
    mapped = map_tensors(batch, lambda tensor: tensor * 2)
    assert type(mapped) is type(batch)
    assert (read(mapped), read(batch)) == (2, 1)  # the original is as it was


def test_a_packed_sequence_keeps_its_lengths():
    """`batch_sizes` has to stay on the CPU."""
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    mapped = map_tensors(packed, lambda tensor: tensor.double())
    assert isinstance(mapped, nn.utils.rnn.PackedSequence)
    assert (mapped.data.dtype, mapped.batch_sizes.dtype) == (torch.float64, torch.int64)


USER_MODEL = """
import functools, torch
from torch import nn
import torch.nn.functional as F
from trainstep import Workload

class Model(nn.Module):
    def __init__(self, mask=False, attend=True):
        super().__init__()
        self.inner, self.mask, self.attend = nn.Linear(8, 8), mask, attend
    def forward(self, x):
        q = self.inner(x)
        if not self.attend:
            return q
        return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4).bool() if self.mask else None)

def make(**options):
    return Workload(Model(**options), [torch.randn(2, 3, 4, 8)], lambda out, batch: out.square().mean(),
                    functools.partial(torch.optim.SGD, lr=0.1), forward=lambda module, batch: module(batch))

def masked(): return make(mask=True)
def without(): return make(attend=False)
"""


def test_a_factory_may_import_its_neighbours_when_it_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    write_module(tmp_path, monkeypatch, "user_neighbour", USER_MODEL)
    write_module(
        tmp_path, monkeypatch, "user_lazy", "def make():\n    import user_neighbour\n    return user_neighbour.make()"
    )
    assert factory_source("user_lazy:make").build(StepConfig()).module is not None


def test_a_users_attention_is_replaced_and_put_back(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, "user_attention", USER_MODEL)
    original = nn.functional.scaled_dot_product_attention
    losses = []
    for impl in ("eager", "flash-reference"):
        step = build_step(factory_source("user_attention:make"), StepConfig(device="cpu", attention=impl))
        losses.append(float(step(step.next_batch())))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert nn.functional.scaled_dot_product_attention is original


@pytest.mark.parametrize(
    ("factory", "message"), [("masked", "with a mask"), ("without", "never calls torch.nn.functional")]
)
def test_attention_that_cannot_be_replaced_is_not_pretended(tmp_path, monkeypatch, factory, message):
    write_module(tmp_path, monkeypatch, "user_attention", USER_MODEL)
    step = build_step(
        factory_source(f"user_attention:{factory}"), StepConfig(device="cpu", attention="flash-reference")
    )
    with pytest.raises(UnsupportedError, match=message):
        step(step.next_batch())


def test_the_replacement_really_runs(tmp_path, monkeypatch):
    write_module(tmp_path, monkeypatch, "user_attention", USER_MODEL)
    step = build_step(factory_source("user_attention:make"), StepConfig(device="cpu", attention="flash-triton"))
    with pytest.raises(UsageError, match="the Triton kernels run on NVIDIA GPUs"):
        step(step.next_batch())


def test_chunked_loss_trains_the_same():
    source = builtin_source("tiny", SIZES["tiny"])
    losses = {}
    for loss in ("dense", "chunked"):
        step = build_step(source, StepConfig(batch=2, context=32, loss=loss, device="cpu"))
        losses[loss] = [float(step(step.next_batch())) for _ in range(3)]
    assert losses["chunked"] == pytest.approx(losses["dense"], rel=1e-5)
