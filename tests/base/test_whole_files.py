"""Files of a report: whole or not there at all, and never written through a link."""

import contextlib
import json
import os
import resource

import pytest
import torch

from trainstep.base.errors import UsageError
from trainstep.base.files import aside
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.ladder.ranks import _write
from trainstep.measure.allocations.snapshot import write_snapshot
from trainstep.measure.profile.ranges import WARMUP, profiler_of_steps
from trainstep.observe.log import LogWriter
from trainstep.report.formats import write_tables
from trainstep.report.page import Report, write_html
from trainstep.rows import StepRow
from trainstep.rows.records import RecordWriter, SoFar, Times, write_whole
from trainstep.train.loop import _begin
from trainstep.train.metrics import MetricsWriter

ROW = StepRow(workload="toy", times={"step": Times(1.5)}, environment={"device": "a device"})


def row_by_row(out):
    with contextlib.closing(RecordWriter(out / "results.jsonl")) as writer:
        writer.write(ROW)


def so_far(out):
    with contextlib.closing(RecordWriter(out / "results.jsonl")) as writer:
        writer.write(SoFar([ROW]))


def trace(out):
    with profiler_of_steps(1, out / "trace.json.gz", on_gpu=False, shapes=False) as profiler:
        for _ in range(WARMUP + 1):
            torch.ones(2).sum()
            profiler.step()


WRITERS = {
    "page": lambda out: write_html([ROW], out / "report.html"),
    "tables": lambda out: write_tables([ROW], out / "tables"),
    "report": lambda out: Report([ROW]).write(out),
    "rows": lambda out: write_whole(out / "results.jsonl", [ROW]),
    "row by row": row_by_row,
    "so far": so_far,
    "policy": lambda out: Policy({"blocks.0": BlockPolicy(recompute=True)}).save(out / "fit.json"),
    "snapshot": lambda out: write_snapshot({"segments": [], "device_traces": [[]]}, out / "snapshot.pickle"),
    "metrics": lambda out: MetricsWriter(out, step=9, tensorboard=False).close(),
    "run": lambda out: _begin(out, {"a": 1}),
    "order": lambda out: _write(out / "1.json", {"an": "order"}),
}
UNLIMITED = {"trace": trace, "log": lambda out: LogWriter(out / "rank-0.jsonl").write("note", {})}


def files(folder):
    return {each.relative_to(folder): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


@pytest.mark.parametrize("name", [*WRITERS, *UNLIMITED])
def test_no_link_is_followed(name, tmp_path):
    write, out, outside = (WRITERS | UNLIMITED)[name], tmp_path / "linked", tmp_path / "outside"
    write(tmp_path / "plain")
    outside.write_text("mine")
    written = [each.relative_to(tmp_path / "plain") for each in (tmp_path / "plain").rglob("*") if each.is_file()]
    for each in written:
        (out / each).parent.mkdir(parents=True, exist_ok=True)
        for link in (out / each, (out / each).with_name(f".{each.name}")):
            link.symlink_to(outside)
    write(out)
    assert outside.read_text() == "mine"
    assert written
    assert not [each for each in written if (out / each).is_symlink() or not (out / each).exists()]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("most", [0, 10])
def test_a_full_disk_leaves_what_was_there(name, most, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.5}) + "\n")
    WRITERS[name](tmp_path)
    before, limits = files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        with pytest.raises(UsageError, match=r"cannot write .*File too large"):
            WRITERS[name](tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == before


def test_tables_of_before_and_links_in_their_place_go(tmp_path):
    (tmp_path / "tables").mkdir()
    for name in ("old.md", "old.tex", "old.typ", "old.csv", "mine.csv", "mine.tex"):
        (tmp_path / "tables" / name).write_text("old")
    outside = tmp_path / "outside"
    write_tables([ROW], tmp_path / "tables")
    assert {each.stem for each in (tmp_path / "tables").iterdir()} == {"step", "mine"}
    (tmp_path / "tables").rename(outside)
    (tmp_path / "tables").symlink_to(outside)
    before = files(outside)
    write_tables([ROW, StepRow(workload="other")], tmp_path / "tables")
    assert files(outside) == before
    assert not (tmp_path / "tables").is_symlink()


def test_what_an_error_interrupts_is_removed_and_says_what_is_missing(tmp_path):
    with pytest.raises(ZeroDivisionError), aside(tmp_path / "a") as draft:
        draft.write_text(str(1 / draft.write_text("")))
    assert not list(tmp_path.iterdir())
    (tmp_path / "report.html").mkdir()  # where no file can be
    with pytest.raises(UsageError, match=r"cannot write .*report\.html: Is a directory.* \(missing: report\.html\)$"):
        Report([ROW]).write(tmp_path)
    assert (tmp_path / "tables").is_dir(), "the rest is there"


@pytest.mark.parametrize("name", ["pipe", "/dev/shown"])
def test_a_pipe_or_a_device_is_not_replaced(name, tmp_path):
    """As root, that would take /dev/null from the machine."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no regular file"), aside(tmp_path / name) as draft:
        draft.write_text("")
    assert (tmp_path / "pipe").is_fifo()
