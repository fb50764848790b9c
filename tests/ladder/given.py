"""A ladder whose runs are given: what a script does with each set of rungs, with the memory of a GPU."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

from tests.check.test_script import PLAIN
from tests.ladder.changes.test_reasons import SETTINGS
from trainstep.ladder.budget import UNLIMITED
from trainstep.ladder.change import all_changes
from trainstep.ladder.ladder import Ladder
from trainstep.ladder.scripts import MOST_ROUNDS, ScriptRunner
from trainstep.ladder.single import Taken
from trainstep.observe.log import RankLog

BY_NAME = {rung.name: rung for rung in all_changes("script")}
LOADER = {**SETTINGS["loaders"][0], "file": "train.py", "line": 7}
FOUND = {**SETTINGS, "draws": False, "loaders": [LOADER]}


def captured(peak, **changes):
    return dataclasses.replace(PLAIN, peak_gib=peak, **changes)


class Given:
    """A script on a GPU, with runs that are given.

    Args:
        peak: GiB of the script as it is; 2 of them are there between steps, and it could have 10.
        runs: names of rungs, divided by commas → what is other in a run with them.
    """

    def __init__(self, peak=4.0, **runs):
        self.command, self.copies, self.changed = SimpleNamespace(name="train.py"), None, []
        self.plain = {"step_ms": (10.0,) * 7, "captured": captured(peak), "failure": ""}
        self.runs, self.asked, self.judged = runs, [], []
        self.budget, self.run_s, self.drawn_s, self.beside = UNLIMITED, 1.0, 1.0, lambda first: 1

    def run(self, what, changes=(), **more):
        names = ",".join(each.name for each in changes)
        self.asked.append(names)
        self.judged.append(more.get("is_judged", True))
        given = self.plain | self.runs.get(names, {})
        log = RankLog({}, {"settings": FOUND, "places": given.pop("places", {})})
        return Taken(Path(), 0, log, first_step_ms=10.0, **given)


def ladder_of(script, changes, rounds=MOST_ROUNDS, *, are_named=False, at_once=False):
    """The ladder of a script."""
    return Ladder(changes, ScriptRunner(script, rounds, are_named=are_named), at_once=at_once)


def climbed(script, *changes, **options):
    """The ladder, and its rows by change."""
    ladder = ladder_of(script, changes, **options)
    return ladder, {row.change: row for row in ladder.climb()}
