"""The table of scripts under `trainstep run`: what was found, and how it compares with timers by hand."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tables import in_times, kept, origin
from trainstep.report.subjects.run import PHASES
from trainstep.report.tables import Table, text_table

SHOWN = 0.05
"""Phases of at least this share of all phases' medians are named."""


def scripts_of(name: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Where and when they were measured, and the scripts with what came out."""
    found = kept(name)
    devices = {
        cell["device"] if "device" in cell else f"a CPU of {cell['cores']} cores that other work shared"
        for cell in found.values()
    }
    cells = (each for script in found.values() for each in (script, script.get("ladder")) if each)
    return f"{', '.join(sorted(devices))}; {origin(cells)}", found


def scripts(name: str) -> Table:
    """Each script's steps, phases and findings, and how far phases are from the same script's timers by hand."""
    where, found = scripts_of(name)
    lines = []
    for script in found.values():
        if "failed" in script:
            lines.append((script["what"], "–", "–", script["failed"], "–", "–"))
        for place, part in enumerate(script.get("parts", ())):
            whole = sum(part["shares"].values())  # a busy machine's steps have a longer median than their phases
            shares = sorted(((share / whole, name) for name, share in part["shares"].items()), reverse=True)
            phases = ", ".join(f"{PHASES[name]} {share:.0%}" for share, name in shares if share >= SHOWN)
            lines.append(
                (
                    script["what"] + (f", {part['updates']}" if part["updates"] else ""),
                    f"{part['seen']} ({part['timed']})",
                    phases,
                    "" if place else "; ".join(script["found"]) or "nothing",
                    f"{part['apart_share']:.1%} ({part['apart']})",
                    "" if place else _ladder(script.get("ladder")),
                )
            )
    titles = ("script", "steps (timed)", "phases", "found", "off by hand", "ladder, speed-up [95 %]")
    return text_table("scripts", where, titles, lines)


def _ladder(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "not climbed"
    if "failed" in cell or cell["baseline"] != "baseline":
        return f"not judged: {cell.get('failed') or cell['why']}"
    return "; ".join(map(_change, cell["tried"]))


def _change(row: Mapping[str, Any]) -> str:
    if row["speedup"] is None:
        return f"{row['change']}: {row['verdict']}{' (' + row['reason'] + ')' if row['reason'] else ''}"
    gain = in_times(row["speedup"], row["speedup_low"], row["speedup_high"])
    return f"{row['change']}: {gain}, {'accepted' if row['accepted'] else 'rejected'}"


TABLES = {"scripts": partial(scripts, "cpu-run.json"), "scripts-gpu": partial(scripts, "h200-scripts.json")}
