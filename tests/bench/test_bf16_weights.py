"""Models whose weights come in bf16 are measured as they are; a float32 copy of the same weights is what they are held
against."""

import dataclasses
import functools
import json
import sys

import pytest
import torch
from torch import nn

from tests.bench.parallel import by_scheme
from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.schemes import SCHEMES
from trainstep.bench.analysis import analyze
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.planned import planned_bytes
from trainstep.bench.step import StepCase, run_cases
from trainstep.check.ranks import compare_with_one_process
from trainstep.check.step import StepCheck, first_form, plain_form
from trainstep.commands.cli import main
from trainstep.ladder.change import changes_of_step
from trainstep.ladder.steps import climb
from trainstep.step.training_step import build_step
from trainstep.step.workload import Workload, WorkloadSource, factory_source

pytestmark = pytest.mark.usefixtures("small_pool")

PLAIN = StepConfig(device="cpu")
AS_IT_IS = StepConfig(device="cpu", precision="bf16-pure")


class Net(nn.Module):
    """Half of it in bf16, with a norm kept in float32 and a buffer, as loaders of large models leave it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.register_buffer("shift", torch.linspace(-1, 1, 32))
        self.head = nn.Linear(32, 64)
        self.to(torch.bfloat16)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens, scale):
        x = self.embedding(tokens) * scale + self.shift
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x.float()).to(self.head.weight.dtype))


ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)


def workload(optimizer=ADAMW, dtype=torch.bfloat16):
    module = Net()
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (8, 13), generator=generator) for _ in range(3)]
    scales = [torch.rand(8, 13, 1, generator=generator).to(dtype) for _ in tokens]
    return Workload(
        module,
        [*zip(tokens, scales, strict=True)],
        lambda logits, batch: nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[0].flatten()),
        optimizer,
        lambda module, batch: module(*batch),
    )


def source_of(make=workload):
    def build(config):
        torch.manual_seed(config.seed)
        return make()

    return WorkloadSource("in bf16", build)


SOURCE = source_of()


def dtypes_of(step):
    return {name: value.dtype for name, value in [*step.module.named_parameters(), *step.module.named_buffers()]}


def test_the_weights_are_trained_as_they_come_and_a_copy_of_them_in_float32():
    assert SOURCE.own_precision == "bf16-pure"
    own, copy = build_step(SOURCE, AS_IT_IS), build_step(SOURCE, PLAIN)
    assert dtypes_of(own) == dtypes_of(build_step(SOURCE, AS_IT_IS)) == {
        name: torch.float32 if name.startswith("norm") else torch.bfloat16 for name in dtypes_of(own)
    }  # fmt: skip
    assert set(dtypes_of(copy).values()) == {torch.float32}
    for (name, narrow), (_, wide) in zip(own.module.named_parameters(), copy.module.named_parameters(), strict=True):
        assert torch.equal(narrow.float(), wide), name
    assert own.next_batch()[1].dtype == copy.next_batch()[1].dtype == torch.bfloat16, "batches are the author's"
    assert float(own(own.next_batch())) == pytest.approx(float(copy(copy.next_batch())), rel=0.02)
    state = {value.dtype for each in own.optimizer.state.values() for value in each.values() if value.dim()}
    assert state == {torch.bfloat16, torch.float32}


def test_a_batch_in_float32_stays_so_beside_weights_that_come_in_bf16():
    source = source_of(lambda: dataclasses.replace(
        workload(dtype=torch.float32), forward=lambda module, batch: module(batch[0], batch[1].bfloat16())
    ))  # fmt: skip
    step = build_step(source, AS_IT_IS)
    assert step.next_batch()[1].dtype == torch.float32
    assert step(step.next_batch()).isfinite()


def test_a_step_is_judged_by_its_float32_copy_and_timed_as_it_is():
    config = dataclasses.replace(AS_IT_IS, compile="off")
    (row,) = run_cases([StepCase(SOURCE, config, warmup=1, steps=2)])
    assert (row.status, row.precision, row.reason) == ("ok", "bf16-pure", "")
    assert row.step_ms is not None
    assert row.float32_error < row.float32_allowed < 1e-4
    assert 1e-4 < row.gradient_error < row.error_budget < 0.1
    assert row.update_allowed < 0.1, "a budget as large as the updates themselves would allow anything"


class HalvesInBf16(torch.optim.AdamW):
    """Takes half of its learning rate where weights are in bf16."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 3e-3 / (2 if group["fused"] and group["params"][0].dtype == torch.bfloat16 else 1)
        return super().step(closure)


def test_an_optimizer_that_is_wrong_in_bf16_alone_is_found():
    judge = StepCheck(source_of(lambda: workload(functools.partial(HalvesInBf16, lr=3e-3))), PLAIN)
    found = judge.judge(dataclasses.replace(AS_IT_IS, optimizer="adamw-fused"))
    assert (found.gradients.is_right, found.float32.is_right, found.parts["update"].is_right) == (True, True, False)
    assert found.parts["update"].error == pytest.approx(0.5, abs=0.02)
    assert "12 updates of" in str(found)
    assert judge.judge(AS_IT_IS).is_right
    right = StepCheck(SOURCE, PLAIN).judge(dataclasses.replace(AS_IT_IS, optimizer="adamw-fused"))
    assert (right.is_right, right.parts["update"].error > 0) == (True, True)


def test_a_model_without_a_float32_copy_is_its_own_reference_and_says_so():
    """One whose forward asks for bf16 by name."""

    def narrow(module, batch):
        return module.head(module.norm(module.embedding(batch[0]).float()).bfloat16())

    source = source_of(lambda: dataclasses.replace(workload(), forward=narrow))
    (row,) = run_cases([StepCase(source, AS_IT_IS, warmup=0, steps=1)])
    assert row.status == "ok", row.reason
    assert row.float32_error is None
    assert "must have the same dtype" in row.not_in_float32 or "expected m" in row.not_in_float32


def test_a_ladder_starts_from_the_weights_as_they_are():
    first = first_form(SOURCE, dataclasses.replace(AS_IT_IS, compile="model"))
    assert first == AS_IT_IS
    assert plain_form(first) == PLAIN
    assert [rung.name for rung in changes_of_step(SOURCE, "cpu", first)] == ["fused optimizer", "compiled blocks"]
    on_gpu = {rung.name for rung in changes_of_step(SOURCE, "cuda", first)}
    assert not on_gpu & {"TF32 matmuls", "bf16 autocast"}


def test_all_rungs_of_a_ladder_are_in_bf16():
    first = first_form(SOURCE, PLAIN)
    changes = changes_of_step(SOURCE, "cpu", first)[:1]
    rows = list(climb(SOURCE, first, warmup=1, steps=2, changes=changes))
    assert {row.status for row in rows} == {"ok"}
    assert {row.precision for row in rows} == {"bf16-pure"}


FACTORY = """
import tests.bench.test_bf16_weights as here

def make():
    return here.workload()

def half():
    made = here.workload()
    made.module.half()
    return made
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "narrow_model.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("narrow_model", None)
    return "narrow_model:make"


def rows_of(tmp_path, *words):
    assert main_of([*words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]


def main_of(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code or 0


@pytest.mark.parametrize(
    "command",
    [("bench", "step", "--warmup", "1"), ("dtypes",), ("memory",), ("memory", "--peaks"),
     ("profile", "--warmup", "1", "--profiled-steps", "1")],
    ids=" ".join,
)  # fmt: skip
def test_every_command_takes_them(tmp_path, factory, command):
    steps = () if command[0] in ("dtypes", "memory") else ("--steps", "2")
    rows = rows_of(tmp_path, *command, "--workload", factory, *steps)
    assert {row["status"] for row in rows} == {"ok"}
    own = [row for row in rows if row["kind"] != "ceiling"]
    assert {row["case"]["precision"] for row in own} == {"bf16-pure"}
    if command == ("memory",):
        count = sum(each.nbytes for each in [*Net().parameters(), *Net().buffers()])
        weights = [row for row in rows if row["case"].get("owner") == "parameters" and "group" not in row["case"]]
        assert [row["case"]["mode"] for row in weights] == ["forward", "step"]
        assert [row["values"]["mib"] for row in weights] == pytest.approx([count / 2**20] * 2, rel=1e-4)
    if command == ("dtypes",):
        (head,) = (row for row in rows if row["case"]["module"] == "head")
        assert "bf16" in json.dumps(head["values"])


def test_a_precision_that_is_named_is_obeyed(tmp_path, factory):
    rows = rows_of(tmp_path, "bench", "step", "--workload", factory, "--precision", "fp32,bf16", "--steps", "1")
    assert [(row["case"]["precision"], row["status"]) for row in rows] == [("fp32", "ok"), ("bf16", "ok")]


def test_float16_is_still_refused(factory):
    with pytest.raises(UsageError, match=r"is float16; expected float32.*or bf16, which is trained as it is"):
        _ = factory_source("narrow_model:half").own_precision


def test_the_library_takes_them_too(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "trainstep.bench.analysis.analysis_records", lambda source, config, **_: seen.append(config) or []
    )
    analyze(workload)
    assert seen == [StepConfig(precision="bf16-pure")]


def _under_schemes(process):
    names = ("flat", "bucketed-25", "sharded-optimizer", "fsdp", "torch-ddp", "torch-zero", "torch-fsdp2")
    cases = [ParallelCase(SOURCE, AS_IT_IS, SCHEMES[name]) for name in names]
    found = by_scheme(compare_with_one_process(cases, process))
    return {scheme.name: each for scheme, each in found.items()}


@pytest.mark.thorough
@pytest.mark.distributed
def test_schemes_train_them_as_one_process_does(two):
    found = two.run(_under_schemes)[0]
    said = {name: getattr(each, "reason", None) or str(each) for name, each in found.items()}
    refused = {name: words for name, words in said.items() if words}
    assert [*refused] == ["torch-zero", "torch-fsdp2"], f"torch's take one dtype: {refused}"
    assert "same dense type" in refused["torch-zero"]
    assert "uniform original parameter dtype" in refused["torch-fsdp2"]
    for each in (found[name] for name in found if name not in refused):
        assert each.float32.gradient < each.float32.gradient_allowed < 1e-4
        assert each.gradients.gradient_allowed < 0.1
        assert each.parts["optimizer"].error < 0.1


def test_a_rank_is_planned_with_two_bytes_per_number():
    planned = {
        precision: planned_bytes(SCHEMES["flat"], 1000, 2, precision=precision, optimizer="adamw-foreach")
        for precision in ("fp32", "bf16-pure")
    }
    for part in ("weights", "gradients", "optimizer_state", "sent"):
        assert getattr(planned["fp32"], part) == 2 * getattr(planned["bf16-pure"], part) > 0, part
