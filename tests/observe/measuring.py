"""Scripts of this folder measured in this very process, which starts none, or as the command starts them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from torch import nn

from trainstep.ladder.ranks import Leader
from trainstep.observe.command import command_of
from trainstep.observe.log import LogWriter, log_path, read_log
from trainstep.observe.rows import script_records
from trainstep.observe.session import Plan, Session
from trainstep.observe.supervise import Rank
from trainstep.rows.records import read_records

SCRIPTS = Path(__file__).parent / "scripts"
DEEP = Plan(is_deep=True, profiled_steps=0, has_memory=False)
"""Every entry that a deep session has, without its instruments."""


class Net(nn.Sequential):
    """A model of a script's own class."""


def line_of(script, marker):
    """`script.py:12`: where a script has a comment."""
    lines = (SCRIPTS / script).read_text().splitlines()
    return f"{script}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {marker}'))}"


def alone(words):
    """What runs a script for a ladder in one process."""
    return Leader(command_of(words), Rank.of({}), Path())


def measure(script, folder, plan=Plan(), *, call=None):  # noqa: B008
    """The log and the rows of a script, run here under a session."""
    log = LogWriter(log_path(folder, 0))
    log.write("header", {"rank": 0, "world_size": 1, "launch": "test", "script": script})
    session = Session(plan, log)
    session.start()
    try:
        call() if call is not None else runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        session.finish()
    log.write("end", {"how": "returned", "code": 0})
    found = read_log(log_path(folder, 0))
    return found, script_records([found], script, 0)


def run_command(out, *words, **options):
    """`trainstep run` of these words: the process that ended, and the rows it left."""
    command = [sys.executable, "-m", "trainstep", "run", "--out", str(out), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    ended = subprocess.run(command, capture_output=True, text=True, timeout=560, env=environment, **options)
    results = out / "results.jsonl"
    return ended, read_records(results) if results.exists() else []


def sentences(ended):
    """What our part of the standard error says, with its line ends taken out."""
    return re.sub(r"\s+", " ", ended.stderr)
