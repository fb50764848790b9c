"""The border: what is noted of a call, and that nothing else can be seen of it."""

import copy
import functools
import inspect
import io
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainstep.observe.border import READS, Border, Entry, leave_uncompiled


class Model(nn.Module):
    """A model of the script's own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu()


class Base:
    def run(self, x=0):
        seen.append([each.filename for each in inspect.stack()])
        warnings.warn("here", stacklevel=2)
        if x < 0:
            raise ValueError("negative")
        return x + 1

    def __call__(self, x):
        return self.run(x)


class Owner(Base):
    """Inherits what is observed."""


seen = []
FUNCTIONS = SimpleNamespace(__name__=__name__, double=lambda x: Base().run(x))
HERE = __file__


@pytest.fixture
def border():
    failures = []
    made = Border(failures.append)
    made.failures = failures
    leave_uncompiled()
    yield made
    made.remove()


@pytest.fixture
def noted(border):
    """Begins and ends of each call."""
    found = []

    def begins(of, frame):
        found.append(("begins", frame.f_code.co_name))
        return lambda at_s: found.append(("ended", at_s)), ()

    return SimpleNamespace(begins=begins, found=found, drain=border.drain)


CALLS = {
    "method": lambda: Owner().run(1),
    "slot": lambda: Owner()(1),
    "function": lambda: FUNCTIONS.double(1),
    "read": lambda: torch.ones(()).item(),
    "slot of a read": lambda: float(torch.ones(())),
    "model": lambda: Model()(torch.ones(1, 4)),
}


def install(border, begins):
    border.method(Owner, "run", begins)
    border.method(Owner, "__call__", begins)
    border.function((FUNCTIONS,), "double", begins)
    for name in READS:
        border.method(torch.Tensor, name, begins)
    border.method(Model, "__call__", begins)
    border.method(_BaseDataLoaderIter, "__next__", begins, lambda iterator, batch: None)


@pytest.mark.parametrize("name", CALLS)
def test_each_call_begins_and_ends_once(name, border, noted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = CALLS[name]()
        install(border, noted.begins)
        result = CALLS[name]()
    noted.drain()
    kinds = [kind for kind, _ in noted.found]
    calls = 2 if name == "slot" else 1  # it calls a method that is observed too
    assert sorted(kinds) == ["begins"] * calls + ["ended"] * calls
    assert noted.found[0] == ("begins", "<lambda>"), "told with the frame that calls"
    assert torch.equal(result, expected) if isinstance(result, torch.Tensor) and name != "model" else True
    assert type(result) is type(expected)
    assert not border.failures


@pytest.mark.parametrize("name", ["method", "slot", "function"])
def test_no_frame_of_ours_is_on_the_stack(name, border, noted):
    """Neither in the stack, nor where a warning says that it comes from, nor in a traceback."""

    def look():
        seen.clear()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            CALLS[name]()
        with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match="negative") as raised:
            {"method": Owner().run, "slot": Owner(), "function": FUNCTIONS.double}[name](-1)
        frames = [(each.filename, each.lineno) for each in traceback.extract_tb(raised.value.__traceback__)]
        return seen[:1], [(each.filename, each.lineno) for each in warned], frames

    plain = look()
    install(border, noted.begins)
    assert look() == plain
    assert noted.found


def test_warnings_of_c_code_name_the_script_s_line(border, noted):
    def warned():
        torch.set_warn_always(True)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.ones((), dtype=torch.complex64).__float__()  # discards the imaginary part
            float(torch.ones((), dtype=torch.complex64))
        torch.set_warn_always(False)
        return [(each.filename, each.lineno, str(each.message)) for each in found]

    plain = warned()
    install(border, noted.begins)
    assert warned() == plain
    assert noted.found


def test_looked_up_on_a_class_it_is_the_original(border, noted):
    before = {name: getattr(torch.Tensor, name) for name in READS}
    install(border, noted.begins)
    assert {name: getattr(torch.Tensor, name) for name in READS} == before
    assert torch.Tensor.item is torch._C.TensorBase.item
    assert Model.__call__ is nn.Module.__call__
    assert Owner.run is Base.run
    assert not noted.found


def test_a_later_patch_counts_and_is_not_undone(border, noted, monkeypatch):
    install(border, noted.begins)
    monkeypatch.setattr(Base, "run", lambda self, x=0: "patched below")
    assert Owner().run(1) == "patched below"
    assert noted.found
    original = Owner.run
    Owner.run = lambda self, x=0: ("patched over", original(self, x))
    assert Owner().run(1) == ("patched over", "patched below")
    border.remove()
    assert Owner().run(1) == ("patched over", "patched below"), "what the script put there stays"
    del Owner.run
    assert "__call__" not in vars(Model)
    assert not any(isinstance(each, Entry) for kind in (torch.Tensor, Owner, Model) for each in vars(kind).values())


def test_a_patch_that_is_taken_back_leaves_the_entry_in_place(border, noted, monkeypatch):
    install(border, noted.begins)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "item", lambda self: "mine")
        assert torch.ones(()).item() == "mine"
    assert torch.ones(()).item() == 1.0
    assert isinstance(inspect.getattr_static(torch.Tensor, "item"), Entry)


def test_methods_that_are_kept_are_the_original_ones(border, noted):
    install(border, noted.begins)
    read, call = torch.ones(()).item, Model().__call__
    assert read() == 1.0
    assert read.__self__.item() == 1.0
    assert (read.__name__, call.__func__) == ("item", nn.Module.__call__)
    owner = Owner()
    run = owner.run
    assert (run.__self__, run.__name__, run.__doc__) == (owner, "run", None)


class Batches:
    def __init__(self):
        self.left = [3, 2, 1]

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop()


def test_results_are_shown_and_passed_on(border, noted):
    shown = []
    border.method(Batches, "__next__", noted.begins, lambda batches, batch: shown.append((batches.left[:], batch)))
    assert list(Batches()) == [1, 2, 3]
    noted.drain()
    assert shown == [([3, 2], 1), ([3], 2), ([], 3)]
    assert [kind for kind, _ in noted.found] == ["begins", "ended"] * 4, "the end of the last one is an exception"


@pytest.mark.parametrize("where", ["begins", "ended", "has"])
def test_what_raises_in_ours_never_reaches_the_script(where, border):
    def fails(*_):
        raise RuntimeError("ours")

    begins = {"begins": fails, "ended": lambda of, frame: (fails, ()), "has": lambda of, frame: None}[where]
    border.method(Batches, "__next__", begins, fails if where == "has" else None)
    for _ in range(2):
        assert list(Batches()) == [1, 2, 3]
    assert [str(each) for each in border.failures] == ["ours"], "it is told once, and nothing more is observed"


def raises(number, frame):
    raise TimeoutError("the script's own")


def test_an_exception_of_a_signal_s_handler_passes_through_our_code(border):
    before = signal.signal(signal.SIGUSR1, raises)
    try:
        border.method(Owner, "run", lambda of, frame: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(TimeoutError, match="own"):
            Owner().run(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (border.failures, border.is_off) == ([], False), "the observation goes on"


def test_an_exception_of_a_signal_s_handler_is_not_lost_at_the_end_of_a_call(border):
    """A signal arrives while C code runs, and Python comes to its handler after that."""
    before, ended, lost = signal.signal(signal.SIGUSR1, raises), [], []
    try:
        border.function((FUNCTIONS,), "double", lambda of, frame: (ended.append, ()))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "unraisablehook", lost.append)
            FUNCTIONS.double.own = functools.partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGUSR1)
            with pytest.raises(TimeoutError, match="own"):
                FUNCTIONS.double()
        assert not lost
    finally:
        signal.signal(signal.SIGUSR1, before)
    border.drain()
    assert len(ended) == 1


def test_copies_and_pickles_know_nothing_of_it(border, noted):
    cloudpickle = pytest.importorskip("cloudpickle")
    install(border, noted.begins)
    border.function((torch.autograd.graph, torch.autograd), "_engine_run_backward", noted.begins)
    model = Model()
    file = io.BytesIO()
    torch.save(model, file)
    written = [
        file.getvalue(),
        pickle.dumps([model, copy.deepcopy(model), torch.autograd._engine_run_backward]),
        cloudpickle.dumps(type("Local", (Model,), {"forward": lambda self, x: x})),
    ]
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        written.append(cloudpickle.dumps(Model))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert not any(b"trainstep" in each for each in written)
    assert pickle.loads(written[1])[2] is torch.autograd._engine_run_backward


def compiled(model, x):
    """Graphs of several kinds of compiled code, each of which allows no break but the last."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def whole(x):
        return model(x).sum()

    @torch.compile(backend=backend)
    def reads(x):
        return x * 2 if bool(model(x).sum() > 0) else x + 1

    results = [whole(x), torch.compile(model, backend=backend, fullgraph=True)(x), reads(x), reads(x + 1)]
    torch.compiler.reset()
    return graphs, results


def traced(model, x):
    """What compilers and exporters make of a model."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = model, nn.Linear(4, 2)

        def forward(self, x):
            return self.second(self.first(x))

    return [
        torch.jit.script(model).code,
        str(torch.fx.symbolic_trace(Outer()).graph),
        str(torch.jit.trace(model, x).graph).count("aten::"),
        str(torch.export.export(model, (x,)).graph),
    ]


@pytest.mark.filterwarnings("ignore")
def test_compilers_and_exporters_see_the_same(border, noted):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4)
    plain, plain_results = compiled(model, x)
    exported = traced(model, x)
    install(border, noted.begins)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # dynamo warns of code that it cannot trace, such as ours
        under, results = compiled(model, x)
    assert under == plain
    assert all(torch.equal(*each) for each in zip(results, plain_results, strict=True))
    assert traced(model, x) == exported
    assert not border.failures


WALK = """
import sys, types
import torch, torch.distributed, torch.utils.data, torch._dynamo, torch.fx, torch.ao.quantization
import torch.nn.utils, torch.amp, torch.cuda, torch.autograd, torch.optim
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, x):
        return self.layers(x)

def found():
    seen, known = {}, set()
    owners = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch" and module]
    for owner in owners:
        if id(owner) in known:
            continue
        known.add(id(owner))
        try:
            attributes = dict(vars(owner))
        except TypeError:
            continue
        for name, value in attributes.items():
            if isinstance(value, type) and str(getattr(value, "__module__", "")).split(".")[0] == "torch":
                owners.append(value)
            is_module = isinstance(owner, types.ModuleType)
            label = owner.__name__ if is_module else f"{owner.__module__}.{owner.__qualname__}"
            if not name.startswith("__abc") and name != "__dict__" and name != "__warningregistry__":
                seen[label, name] = value
    return seen

models = [Own(), nn.Sequential(nn.Linear(4, 1)), torch.compile(Own(), backend="eager")]

def steps():
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

steps()
first = found()
steps()
before = found()
usual = {key for key in first.keys() | before.keys() if first.get(key, 0) is not before.get(key, 0)}  # counters
from trainstep.observe.session import Plan, Session
from trainstep.observe.log import LogWriter
from pathlib import Path
import os
state = (torch.is_grad_enabled(), torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
before = found()  # with what our own imports import
session = Session(Plan(), LogWriter(Path(os.devnull)))
session.start()
steps()
during = found()
assert state == (torch.is_grad_enabled(), torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
hooks = [name for name in vars(models[0]) if name.endswith("_hooks") and getattr(models[0], name)]
changed = {key for key in before.keys() | during.keys() if before.get(key, 0) is not during.get(key, 0)}
print(sorted(changed - usual), hooks)
assert "__call__" in vars(Own)
session.finish()
after = found()
print(sorted({key for key in before.keys() | after.keys() if before.get(key, 0) is not after.get(key, 0)} - usual))
"""


def test_of_torch_the_closed_list_is_changed_and_nothing_else():
    ended = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    during, after = ended.stdout.strip().splitlines()
    loaders, cuda = "torch.utils.data.dataloader", []
    if torch.version.cuda or torch.version.hip:
        kinds = [(f"torch.cuda.streams.{kind}", "synchronize") for kind in ("Event", "Stream")]
        cuda = [("torch._C", "_cuda_synchronize"), *kinds]
    counter = ("torch.utils.hooks.RemovableHandle", "next_id")  # of all hooks, those of optimizers too
    expected = {
        *(("torch.Tensor", name) for name in READS),
        *((module, "_engine_run_backward") for module in ("torch.autograd", "torch.autograd.graph")),
        *((f"{loaders}._BaseDataLoaderIter", name) for name in ("__next__", "_next_index")),
        (f"{loaders}.DataLoader", "__iter__"),
        ("torch._dynamo.eval_frame.OptimizedModule", "__call__"),
        counter,
        *cuda,
    }
    assert during == f"{sorted(expected)} []"
    assert after == f"{[counter]}"
