import contextlib
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from trainstep.base.commit import commit_of
from trainstep.measure import environment
from trainstep.measure.environment import allocator_settings, cpu_model, describe, gpu_state, measure_ceilings
from trainstep.measure.timing import Lap, Sample, Timing


def test_every_fact_a_row_needs_is_there():
    found = describe(torch.device("cpu"))
    assert {"date", "device", "cpu", "threads", "torch", "triton", "python", "commit"} <= set(found)
    assert found["cpu"] == found["device"] == cpu_model() != ""
    assert found["torch"] == torch.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])


def test_the_commit_is_the_checkouts():
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if head.returncode:
        pytest.skip("the tests do not run in a git checkout")
    assert head.stdout.startswith(describe(torch.device("cpu"))["commit"].rstrip("+"))


def test_what_torchs_allocator_is_told(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert allocator_settings() == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert allocator_settings() == "max_split_size_mb:512"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert allocator_settings() == "expandable_segments:True"


def test_a_cpu_has_no_gpu_state():
    assert gpu_state(torch.device("cpu")) == {}


@pytest.mark.gpu
def test_nvml_answers_on_a_gpu():
    state = gpu_state(torch.device("cuda"))
    assert state["sm_clock_mhz"] > 0
    assert state["power_w"] > 0
    found = describe(torch.device("cuda"))
    assert found["driver"]
    assert found["gpu_uuid"].startswith("GPU-")
    assert found["cpu"] != found["device"]
    assert min(found["max_sm_clock_mhz"], found["memory_clock_mhz"]) > 0


def test_cpu_ceilings_are_positive_and_per_precision():
    ceilings = measure_ceilings(torch.device("cpu"), ("fp32",))
    assert list(ceilings.matmul_tflops) == ["fp32"]
    assert ceilings.matmul_tflops["fp32"] > 0
    assert ceilings.copy_gb_s > 0


class Moved(TorchDispatchMode):
    """Counts the bytes that copies read and write."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.bytes += sum(each.nbytes for each in args[:2])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("best", "sizes"), [(2.0, (256, 1024)), (4.0, (256,))])
def test_ceilings_are_the_best_run_s_work_over_its_time(best, sizes, monkeypatch):
    """Both counted by torch while the work runs, and a clock that says what it is told.

    A CPU that takes 4 ms for a product of 256 x 256 numbers would take 256 for one of 1024 x 1024: it is not asked.
    """
    counted = []

    def timed(step, *, device, warmup, steps):
        with FlopCounterMode(display=False) as flops, Moved() as moved:
            step(lambda name: contextlib.nullcontext())
        counted.append((flops.get_total_flops(), moved.bytes))
        laps = [{"work": Lap(ms, None)} for ms in (2 * best, best, 4 * best)]
        return Timing(tuple(Sample(lap["work"].ms, 0.0, None, lap) for lap in laps), 0)

    monkeypatch.setattr(environment, "time_steps", timed)
    found = measure_ceilings(torch.device("cpu"), ("fp32", "bf16"))
    *products, (_, moved) = counted
    assert [flops for flops, _ in products] == [2 * size**3 for size in sizes] * 2
    rate = 2 * sizes[-1] ** 3 / best / 1e9
    assert found.matmul_tflops == pytest.approx({"fp32": rate, "bf16": rate}, rel=1e-12)
    assert moved > 2**27
    assert found.copy_gb_s == pytest.approx(moved / best / 1e6)


@pytest.mark.gpu
def test_tensor_cores_are_told_from_ordinary_units():
    before = torch.get_float32_matmul_precision()
    ceilings = measure_ceilings(torch.device("cuda"), ("fp32", "tf32", "bf16"))
    assert ceilings.matmul_tflops["tf32"] > 2 * ceilings.matmul_tflops["fp32"]
    assert ceilings.matmul_tflops["bf16"] > 1.2 * ceilings.matmul_tflops["tf32"]
    assert torch.get_float32_matmul_precision() == before


def test_a_tree_with_changes_is_marked(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "a.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "--message", "a")
    assert re.fullmatch(r"[0-9a-f]{10}", commit_of(tmp_path))
    (tmp_path / "a.py").write_text("a = 2\n")
    assert re.fullmatch(r"[0-9a-f]{10}\+", commit_of(tmp_path))
    git("checkout", "a.py")
    (tmp_path / "b.py").write_text("")
    assert commit_of(tmp_path).endswith("+"), "a file that the commit lacks"
