"""A checkpointed block is run again in the state in which it ran first, whatever it reaches, or refused by name."""

import array
import functools
import gc
import itertools
import os
import random
import types
import weakref
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from tests.checkpointing.test_writes import codebook, counts, matrix_through_data, plain_through_data
from trainstep import Workload
from trainstep.base.config import StepConfig
from trainstep.base.errors import UnsupportedError
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.step.training_step import TrainingStep

POLICIES = ["every-1", "selective"]

of_the_file = random.Random(3)
calls_of_the_file = 0
table_of_the_file = np.ones(8)
tensor_of_the_file = torch.ones(8)
bytes_of_the_file = array.array("d", [0.0])
numbers_of_the_file = itertools.count(1)

helpers = types.ModuleType("helpers")
exec("import torch\nsource = torch.Generator()\ndef draw(): return torch.rand(8, generator=source)", vars(helpers))


class Classes(OrderedDict):
    """Holds classes in lists, and gives a new module of one, as transformers' `ACT2FN` does."""

    def __getitem__(self, name):
        return super().__getitem__(name)[0]()

    def __setitem__(self, name, kind):
        super().__setitem__(name, [kind])


classes_of_the_file = Classes()


class Slotted:
    __slots__ = ("__source", "count")

    def __init__(self, seed):
        self.count, self.__source = 0, np.random.RandomState(seed)

    def __call__(self):
        self.count += 1
        return self.count * self.__source.rand()


class Cache:
    """Keys by layer, as decoders keep them: an object that holds a list of objects; and a tensor of a fixed size."""

    def __init__(self, layers):
        self.layers, self.fixed = [types.SimpleNamespace(keys=None) for _ in range(layers)], torch.zeros(3, 5, 8)

    def update(self, layer, keys):
        held = self.layers[layer]
        held.keys = keys if held.keys is None else torch.cat([held.keys, keys], dim=1)
        return held.keys


class Block(nn.Module):
    """Multiplies by `extra(block, x)` before a product, so that wrong numbers reach the gradients."""

    shared = np.random.default_rng(5)
    calls = 0
    places = torch.ones(8)

    def __init__(self, extra, seed):
        super().__init__()
        self.extra = extra
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.code = nn.Parameter(torch.ones(8))
        self.register_buffer("matrix", torch.ones(8, 8))
        self.plain, self.array, self.bits = torch.ones(8), np.ones(8), array.array("d", [1.0])
        self.generator = torch.Generator().manual_seed(seed)
        self.numpy, self.philox = np.random.default_rng(seed), np.random.Philox(seed)
        self.python, self.slotted = {"rng": random.Random(seed)}, Slotted(seed)
        self.draw = functools.partial(torch.rand, 8, generator=torch.Generator().manual_seed(seed))
        self.method = np.random.default_rng(seed).random
        self.system, self.scales = random.SystemRandom(), iter([1.0 + n for n in range(99)])
        self.hidden = [nn.Linear(8, 8)]
        self.norm, self.count, self.table, self.recent, self.names = nn.BatchNorm1d(8), 0, {}, deque(), set()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.hook = types.SimpleNamespace(source=torch.Generator().manual_seed(seed))
        self.out.register_forward_pre_hook(self.before)

    def before(self, module, args):
        return (args[0] * torch.rand(8, generator=self.hook.source),) if self.extra is hooked else None

    def forward(self, x, source=None, cache=None):
        x = torch.tanh(self.fc(x))
        given = (source, cache) if self.extra in TAKE_ARGUMENTS else ()
        return x + torch.tanh(self.out(x * self.extra(self, x, *given)))


class Stack(nn.Module):
    def __init__(self, extra, policy):
        super().__init__()
        self.blocks = nn.ModuleList(Block(extra, seed) for seed in range(2))
        self.source = torch.Generator().manual_seed(7)
        Checkpointing(self, policy)

    def forward(self, x):
        cache = Cache(2)
        for block in self.blocks:
            x = block(x, self.source, cache)
        return x


def torch_generator(block, x):
    return torch.rand(8, generator=block.generator)


def numpy_generator(block, x):
    return float(block.numpy.random())


def bit_generator(block, x):
    return float(np.random.Generator(block.philox).random())


def python_generator(block, x):
    return block.python["rng"].random()


def slots(block, x):
    return float(block.slotted())


def partial(block, x):
    return block.draw()


def bound_method(block, x):
    return float(block.method())


def hooked(block, x):
    return 1.0


def passed(block, x, source, cache):
    return torch.rand(8, generator=source)


def fills_a_cache(block, x, source, cache):
    keys = cache.update(0, block.fc(x))
    return torch.softmax(x @ keys.mT, -1) @ keys


def fixed_cache(block, x, source, cache):
    keys = block.fc(x)
    cache.fixed += keys.detach()
    return keys + cache.fixed.clone()


TAKE_ARGUMENTS = (passed, fills_a_cache, fixed_cache)


def generator_of_the_file(block, x):
    return of_the_file.random()


def generator_of_another_file(block, x):
    return helpers.draw()


def generator_of_the_class(block, x):
    return float(block.shared.random())


def default_argument(block, x, source=torch.Generator()):  # noqa: B008
    return torch.rand(8, generator=source)


def counts_in_the_file(block, x):
    global calls_of_the_file
    calls_of_the_file += 1
    return calls_of_the_file


def counts_in_the_class(block, x):
    type(block).calls += 1
    return block.calls


def counts_in_the_function(block, x):
    vars(counts_in_the_function)["calls"] = vars(counts_in_the_function).get("calls", 0) + 1
    return counts_in_the_function.calls


def closure():
    source, calls = torch.Generator(), 0

    def in_a_closure(block, x):
        nonlocal calls
        calls += 1
        return calls * torch.rand(8, generator=source)

    return in_a_closure


def scalar_drawn_once_in_three(block, x):
    block.slotted.count += 1
    return block.numpy.random(8).astype("f4")[0].item() if block.slotted.count % 3 == 0 else 2.0


def adds_to_a_buffer(block, x):
    block.mean += 1
    return block.mean


def replaces_a_buffer(block, x):
    block.mean = block.mean + 1
    return block.mean


def makes_a_table_once(block, x):
    if "scale" not in block.table:
        block.table["scale"] = torch.ones(8, 2).matmul(torch.ones(2, 8))[0]  # another product than the second time
    return block.table["scale"]


def remembers(block, x):
    block.recent.append(len(block.recent))
    block.names.add(len(block.names))
    return len(block.recent) + len(block.names)


def makes_a_module_of_a_class(block, x):
    classes_of_the_file[len(classes_of_the_file)] = nn.Tanh
    return len(classes_of_the_file) * classes_of_the_file["tanh"](x)


def makes_an_attribute(block, x):
    if not hasattr(block, "made"):
        block.made = 3.0
        return 2.0
    return block.made


def draws_from_python(block, x):
    return random.random()


def draws_from_numpy(block, x):
    return float(np.random.rand())


def normalizes(block, x):
    return block.norm(x.mT).mT


def normalizes_by_a_function(block, x):
    return F.batch_norm(x.mT, block.mean, block.var, training=True).mT


def drops(block, x):
    return F.dropout(x, 0.5)


RIGHT = [
    *(torch_generator, numpy_generator, bit_generator, python_generator, slots, partial, bound_method, hooked, passed),
    *(generator_of_the_file, generator_of_another_file, generator_of_the_class, default_argument),
    *(counts_in_the_file, counts_in_the_class, counts_in_the_function, matrix_through_data),
    *(scalar_drawn_once_in_three, "closure"),
    *(fills_a_cache, counts, adds_to_a_buffer, replaces_a_buffer, makes_a_table_once, remembers, makes_an_attribute),
    *(draws_from_python, draws_from_numpy, makes_a_module_of_a_class, normalizes, normalizes_by_a_function, drops),
]


def trained(policy, extra, steps=4):
    """Gradients of some steps, and afterwards what each generator would draw next, and what blocks count and hold."""
    global calls_of_the_file
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    calls_of_the_file, Block.calls, Block.shared = 0, 0, np.random.default_rng(5)
    of_the_file.seed(3)
    helpers.source.manual_seed(4)
    default_argument.__defaults__[0].manual_seed(6)
    vars(counts_in_the_function).clear()
    classes_of_the_file.clear()
    classes_of_the_file["tanh"] = nn.Tanh
    module = Stack(closure() if extra == "closure" else extra, policy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(3, 5, 8).cumsum(1)).square().mean().backward()
        seen += [each.grad.clone() for each in module.parameters() if each.grad is not None]
        optimizer.step()
    first = module.blocks[0]
    sources = [first.generator, first.hook.source, first.draw.keywords["generator"], module.source, helpers.source]
    after = [torch.rand((), generator=each).item() for each in sources]
    after += [first.numpy.random(), np.random.Generator(first.philox).random(), first.python["rng"].random()]
    after += [first.slotted(), first.method(), of_the_file.random(), Block.shared.random()]
    after += [torch.rand(()).item(), random.random(), np.random.rand(), calls_of_the_file, Block.calls]
    after += [
        getattr(counts_in_the_function, "calls", 0),
        first.count,
        first.recent,
        first.names,
        [*first.table],
        list(classes_of_the_file.items()),
    ]
    return seen, [*after, *(each.tolist() for each in module.buffers())]


@pytest.mark.parametrize("extra", RIGHT, ids=lambda extra: getattr(extra, "__name__", extra))
def test_state_is_that_of_the_first_run_and_left_as_without_checkpointing(extra):
    expected, after = trained("none", extra)
    for policy in POLICIES:
        found, left = trained(policy, extra)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), policy
        assert left == after, policy


def parameter_through_data(block, x):
    block.code.data.mul_(0.5)
    return block.code.detach().clone()


def parameter_with_other_data(block, x):
    block.code.data = block.code.data * 0.5
    return block.code.detach().clone()


def class_through_data(block, x):
    block.places.data += 1
    return block.places.clone()


def tensor_in_the_file(block, x):
    tensor_of_the_file.add_(1)
    return tensor_of_the_file.clone()


def array_of_the_block(block, x):
    block.array[0] += 1
    return float(block.array[0])


def array_of_the_file(block, x):
    table_of_the_file[:] += 1
    return float(table_of_the_file[0])


def iterator_of_the_block(block, x):
    return next(block.scales)


def iterator_of_the_file(block, x):
    return next(numbers_of_the_file)


def generator_in_a_closure():
    factors = (1.0 + n for n in range(99))
    return lambda block, x: next(factors)


def system_random(block, x):
    return block.system.random()


REFUSED = [
    (codebook, r"changes blocks\.0\.code in place"),
    (parameter_through_data, r"changes blocks\.0\.code in place"),
    (parameter_with_other_data, r"changes blocks\.0\.code in place"),
    (plain_through_data, r"changes blocks\.0\.plain in place"),
    (class_through_data, r"changes Block\.places in place"),
    (tensor_in_the_file, r"changes the global tensor_of_the_file of .*test_reaching in place"),
    (array_of_the_block, r"changes blocks\.0\.array in place"),
    (array_of_the_file, r"changes the global table_of_the_file of .*test_reaching in place"),
    (iterator_of_the_block, r"blocks\.0\.scales, a list_iterator"),
    (iterator_of_the_file, r"the global numbers_of_the_file of .*test_reaching, a count"),
    (generator_in_a_closure(), r"factors in the closure of .*<lambda>, a generator"),
    (system_random, r"blocks\.0\.system, a SystemRandom"),
    (fixed_cache, r"blocks.0 changes its argument (cache|2) in place"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("extra", "said"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_cannot_be_put_back_is_refused_by_name(extra, said, policy):
    with pytest.raises(UnsupportedError, match=said):
        trained(policy, extra, steps=1)


class LateBlock(nn.Module):
    """Changes its codebook in its third call in training."""

    def __init__(self, write):
        super().__init__()
        self.fc, self.code, self.calls, self.write = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), 0, write

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == 3:
                self.write(self.code)
        return torch.tanh(self.fc(x) * self.code.detach().clone())


def test_a_counted_write_is_refused_whenever_it_comes():
    module = nn.Sequential(nn.ModuleList([LateBlock(torch.no_grad()(lambda code: code.mul_(0.5)))]))
    Checkpointing(module, "every-1")
    block, x = module[0][0], torch.ones(3, 8)
    for _ in range(2):
        block(x).sum().backward()
    with pytest.raises(UnsupportedError, match=r"0\.0 changes 0\.0\.code in place"):
        block(x)


def test_values_are_read_in_training_even_if_evaluation_came_first():
    module = nn.Sequential(nn.ModuleList([LateBlock(lambda code: code.data.mul_(0.5))]))
    Checkpointing(module, "every-1")
    block, x = module[0][0], torch.ones(3, 8)
    block.eval()(x).sum().backward()
    block.calls = 2
    with pytest.raises(UnsupportedError, match=r"0\.0 changes 0\.0\.code in place"):
        block.train()(x)


@torch.no_grad()
def decorated(block, x):
    return float(Block.shared.random())


def imported_inside(block, x):
    from tests.checkpointing.test_reaching import of_the_file as source

    return source.random()


@pytest.mark.parametrize("extra", [decorated, imported_inside])
def test_names_are_followed_through_decorators_and_imports(extra):
    assert all(torch.equal(a, b) for a, b in zip(trained("every-1", extra)[0], trained("none", extra)[0], strict=True))


def test_nothing_of_the_first_call_s_arguments_is_held():
    class Tagged:
        pass

    module = nn.Sequential(nn.ModuleList([Block(lambda block, x: 2.0, 0)]))
    Checkpointing(module, "every-1")
    argument = Tagged()
    call, tag = functools.partial(max, argument), weakref.ref(argument)
    module[0][0](torch.ones(3, 8), source=call).sum().backward()
    del argument, call
    gc.collect()
    assert tag() is None


def bits(block, x):
    block.bits[0] += 1
    return block.bits[0]


def array_of_bytes(block, x):
    bytes_of_the_file[0] += 1
    return bytes_of_the_file[0]


def operating_system(block, x):
    return int.from_bytes(os.urandom(4)) / 2**32


def hidden_module(block, x):
    block.hidden[0].weight.data.mul_(0.5)
    return block.hidden[0].weight.detach().sum(0)


UNKNOWN = [bits, array_of_bytes, operating_system, hidden_module]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("extra", UNKNOWN, ids=lambda each: each.__name__)
def test_what_is_not_found_is_noticed_in_the_first_step(extra, policy):
    with pytest.raises(UnsupportedError, match=r"blocks\.\d does not compute in backward what it computed in forward"):
        trained(policy, extra, steps=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_backward_repeats_the_same(policy):
    def gradients(policy):
        torch.manual_seed(0)
        module = Stack(counts, policy)
        loss = module(torch.ones(3, 5, 8).cumsum(1)).square().mean()
        loss.backward(retain_graph=True)
        trained = [each for each in module.parameters() if each.grad is not None]
        first = [each.grad.clone() for each in trained]
        if policy != "selective":  # torch lets selective results be used once
            loss.backward()
            assert all(torch.equal(each.grad, 2 * once) for each, once in zip(trained, first, strict=True))
        return first

    assert all(torch.equal(a, b) for a, b in zip(gradients(policy), gradients("none"), strict=True))


def test_a_spectral_norms_iteration_is_not_taken_twice():
    def gradients(policy):
        torch.manual_seed(0)
        module = Stack(normalizes, "none")
        for block in module.blocks:
            nn.utils.parametrizations.spectral_norm(block.fc)
        Checkpointing(module, policy)
        module(torch.ones(3, 5, 8).cumsum(1)).square().mean().backward()
        return [*(p.grad for p in module.parameters() if p.grad is not None), *module.buffers()]

    for policy in POLICIES:
        assert all(torch.equal(a, b) for a, b in zip(gradients(policy), gradients("none"), strict=True))


outside = bytearray()  # memory that is not put back


def adds_more_the_second_time(block, x):
    outside.append(1)
    for _ in range(1 + (len(outside) > 2)):
        x = x @ torch.eye(8)  # selective policies count products
    return x.sigmoid()


def changes_shape_the_second_time(block, x):
    outside.append(1)
    return x.mul(2).reshape(3, 40).sigmoid().view(3, 5, 8) if len(outside) <= 2 else x.mul(2).sigmoid()


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        ("every-1", changes_shape_the_second_time),
        ("selective", changes_shape_the_second_time),
        ("selective", adds_more_the_second_time),
    ],
)
def test_what_cannot_be_repeated_names_the_block(policy, extra):
    outside.clear()
    torch.manual_seed(0)
    batches = [(torch.ones(3, 5, 8).cumsum(1),)]
    workload = Workload(Stack(extra, "none"), batches, lambda output, _: output.square().mean(), torch.optim.SGD)
    step = TrainingStep(workload, StepConfig(device="cpu", checkpointing=policy))
    with pytest.raises(UnsupportedError, match=r"blocks\.\d.* does not do in backward what it did in forward"):
        step.gradients(step.next_batch())


def test_lack_of_memory_in_backward_stays_what_it_is():
    def asks_for_too_much(block, x):
        outside.append(1)
        return x if len(outside) <= 2 else x.expand(1 << 40, *x.shape).contiguous()[0]

    outside.clear()
    with set_checkpoint_early_stop(False), pytest.raises(RuntimeError, match=r"memory|too large") as caught:
        trained("every-1", asks_for_too_much, steps=1)
    assert not isinstance(caught.value, UnsupportedError)
