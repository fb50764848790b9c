"""The tour of docs/tour.md: both forms compute the same, the tool gives the advice the page follows, commands run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.tour import fast, slow
from trainstep.base.config import StepConfig
from trainstep.bench.profile import profile_records
from trainstep.ladder.change import changes_of_step
from trainstep.ladder.steps import climb
from trainstep.report.subjects import findings, kernel_findings
from trainstep.step.training_step import build_step
from trainstep.step.workload import WorkloadSource

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "tour.md").read_text(encoding="utf-8")
COMMANDS = [line.split()[1:] for line in re.findall(r"^trainstep .*$", PAGE, re.MULTILINE)]
CONFIG = StepConfig(device="cpu")
SHRUNK = {"VOCABULARY": 64, "WIDTH": 32, "LAYERS": 1, "HEADS": 2, "CONTEXT": 64}


def shrink(monkeypatch):
    for form in (slow, fast):
        for name, value in SHRUNK.items():
            monkeypatch.setattr(form, name, value)


def source(form):
    def build(config):
        torch.manual_seed(config.seed)
        return form.workload()

    return WorkloadSource("tour", build)


def gradients(form):
    step = build_step(source(form), CONFIG)
    loss = float(step.gradients(step.next_batch()))
    return loss, {name: parameter.grad for name, parameter in step.module.named_parameters()}


def test_slow_and_fast_compute_the_same(monkeypatch):
    shrink(monkeypatch)
    (loss, expected), (other, found) = gradients(slow), gradients(fast)
    assert other == pytest.approx(loss, rel=1e-6)
    assert expected.keys() == found.keys()
    norm = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    for name, grad in expected.items():
        assert float((found[name] - grad).norm()) < 1e-5 * norm, name


def test_the_page_says_what_changed():
    """The two calls shown are lines of fast.py and none of slow.py; the forms differ in little else."""
    lines = {form: set(Path(form.__file__).read_text(encoding="utf-8").splitlines()) for form in (slow, fast)}
    code = [line for line in lines[fast] - lines[slow] if re.match(r"\s+(\w+ = |return )", line)]
    for call in ("F.scaled_dot_product_attention(", "F.cross_entropy("):
        assert any(call in line for line in code)
        assert call in PAGE
    assert len(code) == 3, code


def test_the_advice_is_given_to_slow_and_not_to_fast(monkeypatch):
    shrink(monkeypatch)
    monkeypatch.setattr(kernel_findings, "FORMULA", 1e-9)  # any share of the time, which on a busy machine may be small
    said = {}
    for form in (slow, fast):
        records = list(profile_records(source(form), CONFIG, warmup=1, steps=2, profiled_steps=1, trace=None))
        said[form] = [finding for finding in findings(records) if finding.topic == "formulas"]
    attention, loss = said[slow]
    assert (attention.id, attention.figures["modules"]) == ("formulas.attention-written-out", ("blocks.*.attention",))
    assert loss.id == "formulas.cross-entropy-written-out"
    assert said[fast] == []


def test_the_ladder_does_not_take_a_key_bias_for_wrong(monkeypatch):
    """Its gradient is zero but for rounding, in slow.py as in GPT-2."""
    shrink(monkeypatch)
    bf16 = [each for each in changes_of_step(source(slow), "cpu", CONFIG) if each.precision]
    *rungs, _ = climb(source(slow), CONFIG, warmup=1, steps=2, changes=bf16)
    assert [row.status for row in rungs] == ["ok", "ok"], rungs[-1].reason
    assert 0 < rungs[1].values["gradient_error"] < rungs[1].values["error_budget"]


@pytest.mark.thorough
def test_the_proof_runs_as_it_stands_on_the_page(tmp_path):
    """`bench step` and `compare`, on small models in another folder; that `analyze` parses, test_docs.py sees."""
    for form in (slow, fast):
        text = Path(form.__file__).read_text(encoding="utf-8")
        names = ", ".join([*SHRUNK, "BATCH"])
        small, count = re.subn(rf"^{names} = .*$", f"{names} = 256, 32, 1, 2, 64, 2", text, flags=re.MULTILINE)
        assert count == 1
        folder = tmp_path / "examples" / "tour"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / Path(form.__file__).name).write_text(small, encoding="utf-8")
    assert [words[0] for words in COMMANDS] == ["analyze", "analyze", "bench", "bench", "compare"]
    for words in COMMANDS[2:]:
        device = [] if words[0] == "compare" else ["--device", "cpu", "--steps", "7"]
        found = subprocess.run(
            [sys.executable, "-m", "trainstep", *words, *device], cwd=tmp_path, capture_output=True, text=True
        )
        assert found.returncode == 0, f"{words}: {found.stdout}{found.stderr}"
    assert re.search(r"losses.*differ by", found.stdout, re.DOTALL)
