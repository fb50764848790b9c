"""Injected bugs that gradients, losses and trained weights do not show, and correct changes, in a ladder's trial."""

import functools
import tomllib
from pathlib import Path

import pytest

from tests.ladder.forked import forked_runs  # noqa: F401
from tests.observe.measuring import alone
from tools.trust import planted
from trainstep.ladder.change import all_changes, chosen
from trainstep.ladder.ladder import Refused
from trainstep.ladder.scripts import ScriptRunner
from trainstep.ladder.single import Script
from trainstep.observe.copying import Copies

SCRIPTS = tomllib.loads((Path(planted.__file__).parent / "scripts.toml").read_text())
SOME = ("a module's halved", "left on in", "statistics: move", "returns zeros", "a dict's decays", "drawn by torch")
SOME += ("foreach",)


def judge_of(text, folder, patch):
    """Run a script as it is; the answer says why an edit of it, or a change of the ladder, is wrong, or nothing."""
    (file := folder / "copied" / "train.py").parent.mkdir(parents=True)
    file.write_text(text)
    patch.chdir(file.parent)
    runner = ScriptRunner(Script(alone([str(file)]), folder / "runs", 30, Copies(folder / "runs", folder / "large")))
    top = runner.measure("baseline", (), None)
    runner._in_turns = lambda *_, **__: ([top.taken], [top.taken])

    def why_wrong(edit):
        patch.chdir(file.parent)
        if isinstance(edit, list):
            return runner.check_sources({str(file): edited(text, edit)}, []).reason
        try:
            runner.measure(edit, chosen(all_changes("script"), edit), top)
        except Refused as refused:
            return refused.values["reason"]
        return ""

    return why_wrong


def edited(text, edit):
    assert text.count(edit[0]) == 1, edit
    return text.replace(*edit)


@pytest.mark.parametrize("wanted", [SOME, pytest.param([""], marks=pytest.mark.thorough)])
def test_what_training_does_not_show_is_wrong(wanted, forked_runs, monkeypatch, tmp_path):  # noqa: F811
    judge, missed = functools.cache(lambda text: judge_of(text, tmp_path / f"{hash(text)}", monkeypatch)), {}
    for kind, named in SCRIPTS["kinds"].items():
        for what, (base, edit, *first) in named.items():
            if any(each in f"{kind}: {what}" for each in wanted):
                why = judge(functools.reduce(edited, first, SCRIPTS["bases"][base]))(edit)
                print(f"{kind}: {what}: {why or 'right'}")
                missed |= {what: why} if bool(why) is (kind == "right") else {}
    assert missed == {}
