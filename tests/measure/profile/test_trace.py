"""torch.profiler's JSON: kernels joined to their launches, and what is no such file."""

import gzip
import json

import pytest

from trainstep.base.errors import UsageError
from trainstep.measure.profile import chrome as module
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import profile_of
from trainstep.measure.profile.ranges import classify_range
from trainstep.measure.profile.trace import COMPILED, ENGINE, Range, own_time


def event(category, name, start, duration, *, tid=10, pid=1, **arguments):
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration,
            "args": arguments}  # fmt: skip


def launch(name, start, correlation, *, category="cuda_runtime", tid=10):
    return event(category, name, start, 2.0, tid=tid, correlation=correlation)


GPU = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        event("Trace", "PyTorch Profiler (0)", 999.0, 500.0, tid="PyTorch Profiler", pid="Spans"),
        event("user_annotation", "step:0", 1000.0, 400.0),
        event("user_annotation", "phase:forward", 1001.0, 100.0),
        event("user_annotation", "module:layer", 1002.0, 90.0),
        event(
            "cpu_op", "aten::mm", 1010.0, 20.0,
            **{"Sequence number": 3, "Fwd thread id": 0, "Input Dims": [[8, 4], [4, 2]],
               "Input type": ["c10::BFloat16", "c10::BFloat16"], "Concrete Inputs": ["", ""]},
        ),
        launch("cudaLaunchKernel", 1015.0, 7),
        launch("cuLaunchKernelEx", 1020.0, 8, category="cuda_driver"),
        launch("cudaMemcpyAsync", 1050.0, 9),
        event("kernel", "nvjet_tst_128x256_64x4_1x2_h_bz_NTN", 1100.0, 30.0, tid=7, pid=0,
              correlation=7, device=0, stream=7),
        event("kernel", "void cublasLt::splitKreduce_kernel<32>(x)", 1130.0, 10.0, tid=7, pid=0,
              correlation=8, device=0, stream=7),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1140.0, 4.0, tid=7, pid=0,
              correlation=9, device=0, stream=13, bytes=4096),
        event("gpu_user_annotation", "module:layer", 1100.0, 40.0, tid=7, pid=0, device=0, stream=7),
        event("kernel", "void orphan_kernel(int)", 1200.0, 5.0, tid=7, pid=0, correlation=1234, device=0, stream=7),
    ],
}  # fmt: skip


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def test_kernels_are_joined_to_the_operator_that_launched_them(tmp_path):
    trace = read_chrome_trace(write(tmp_path / "trace.json", GPU))
    assert trace.device == "NVIDIA H200"
    profile = profile_of(trace)
    product, reduction, copy, orphan = profile.kernels
    assert (product.family, product.phase, product.module, product.operator) == (
        "tensor-core matmul", "forward", "layer", "aten::mm",
    )  # fmt: skip
    assert product.duration_us == pytest.approx(30.0)
    assert (product.flops, product.bytes) == (2 * 8 * 4 * 2, 2 * (8 * 4 + 4 * 2 + 8 * 2))
    assert reduction.family == "reduction"
    assert reduction.flops is None, "a call that launches two kernels counts once"
    assert reduction.call == product.call
    assert (copy.family, copy.lane, copy.module) == ("copy", "copies", "layer")
    assert (orphan.step, orphan.phase, orphan.module) == ("0", None, None), "its launch was not recorded"
    assert profile.share(lambda each: each.phase is not None) == pytest.approx(44 / 49)


def test_gzipped_files_are_read_alike(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(GPU).encode(), mtime=0))
    assert len(profile_of(read_chrome_trace(path)).kernels) == 4


def cut(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a trace of torch.profiler"),
        (b"\x00\x01\x02", "not a trace of torch.profiler"),
        (b'{"hello": 1}', "no list of traceEvents"),
        (b"[1, 2]", "no object with a list of traceEvents"),
        (cut(json.dumps(GPU).encode()), "cut short"),
        (cut(gzip.compress(json.dumps(GPU).encode(), mtime=0)), "cut short"),
        (gzip.compress(json.dumps(GPU).encode(), mtime=0)[:-8] + b"damaged!", "CRC check failed"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}',
            "the event k of category kernel at ts None has no 'ts'; expected events as torch.profiler's",
        ),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "duration": 2}]}',
            "the event k of category kernel at ts 1.0 has no 'dur'; expected events",
        ),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": "long"}]}',
            "the event k of category kernel at ts 1.0 cannot be read: could not convert string to float: 'long'",
        ),
        (b'{"traceEvents": [3]}', "an event cannot be read: 'int' object has no attribute 'get'"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(tmp_path, content, says):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says) as raised:
        read_chrome_trace(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_missing_file_and_one_too_large_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="No such file"):
        read_chrome_trace(tmp_path / "absent.json")
    monkeypatch.setattr(module, "MOST", 5)
    with pytest.raises(UsageError, match=r"\(0\.0 GiB\) holds more than"):
        read_chrome_trace(write(tmp_path / "trace.json", GPU))


@pytest.mark.parametrize("name", ["mine", "my::attention"])
def test_somebody_s_range_is_no_operator_whatever_its_name(tmp_path, name):
    path = tmp_path / "trace.json"
    events = [
        event("user_annotation", "step:0", 0.0, 100.0),
        event("user_annotation", name, 10.0, 80.0),
        event("cpu_op", "aten::mm", 20.0, 30.0),
    ]
    (work,) = profile_of(read_chrome_trace(write(path, {"traceEvents": events}))).kernels
    assert (work.name, work.duration_us) == ("aten::mm", 30)


def test_own_time_leaves_out_what_others_did():
    def made(start, end, text):
        kind, name, sequence = classify_range(text)
        return Range((1, 10), start, end, kind, name, sequence)

    rows = [
        made(0, 100, "phase:forward"),
        made(10, 60, "aten::linear"),
        made(20, 30, "aten::t"),
        made(40, 55, "aten::mm"),
        made(70, 90, "autograd::engine::evaluate_function: MmBackward0"),
        made(75, 85, "## Call CompiledFxGraph abc ##"),
    ]
    found = [(each.name, each.start, each.duration, each.is_continued) for each in own_time(rows)]
    assert sorted(found, key=lambda row: row[1]) == [
        ("aten::linear", 10, 10, False),
        ("aten::t", 20, 10, False),
        ("aten::linear", 30, 10, True),
        ("aten::mm", 40, 15, False),
        ("aten::linear", 55, 5, True),
        (ENGINE, 70, 5, False),
        (COMPILED, 75, 10, False),
        (ENGINE, 85, 5, True),
    ]
