"""What rows of ladders carry of their changes."""

from trainstep.ladder.change import all_changes
from trainstep.rows import FINAL, ON_TOP, ChangeRow

BY_NAME = {each.name: each for place in ("script", "cuda", "cpu") for each in all_changes(place)}


def carried(name):
    """The line of a change and what it answers, as its row has them."""
    change = BY_NAME.get(name.removesuffix(ON_TOP))
    if change is None:
        return {}
    return {"code": change.line.code, "where": change.line.where, "answers": change.answers or None}


def drifted(end, ms, again_ms, low=None, high=None, name="baseline"):
    """Fields of a final configuration: one of its ends, measured again."""
    drift = {"drift": again_ms / ms, "drift_low": low, "drift_high": high}
    return {end: name, **{f"{end}_{key}": value for key, value in ({"ms": ms, "again_ms": again_ms} | drift).items()}}


def final(case=None, **fields):
    """The row at the end of a ladder."""
    return ChangeRow(**{"accepted": True, **(case or {}), "change": FINAL, **fields})
