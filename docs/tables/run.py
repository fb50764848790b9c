"""Tables of scripts under `trainstep run`: beside timers by hand, and after a ladder beside what an expert wrote."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

from tables import in_times, kept, origin, times_as_long
from tables.attention import by_shape
from trainstep.report.numbers import NONE
from trainstep.report.subjects.run import PHASES
from trainstep.report.tables import Table, text_table
from trainstep.rows import FINAL

SHOWN = 0.05
"""Phases of at least this share of all phases' medians are named."""


EXPERT_TITLES = (
    *("script", "GPU", "as it is (ms)", "ladder's top (ms)", "accepted", "by hand (ms)", "has by hand"),
    "of its speed [95 %]",
)


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


def experts() -> Table:
    """Milliseconds of a step as it is, of the ladder's top and of the expert's script: medians of runs' medians."""
    where, found = scripts_of("experts.json")
    return text_table("experts", where, EXPERT_TITLES, [_beside_expert(cell) for cell in found.values()])


def _beside_expert(cell: Mapping[str, Any]) -> tuple[str, ...]:
    baseline, *tried = cell["changes"]
    built_on = [row["change"] for row in tried if row["accepted"] and row["change"] != FINAL]
    ended = "" if cell["is_whole"] else f" (interrupted after {cell['climbed_s'] / 60:.0f} minutes)"
    low = cell["of_expert_low"]
    return (
        cell["what"],
        cell["device"].removeprefix("NVIDIA ").split()[0],
        f"{baseline['step_ms']:.1f}",
        f"{statistics.median(cell['top_ms']):.1f}",
        (", then ".join(built_on) or "nothing") + ended,
        f"{statistics.median(map(statistics.median, cell['expert_ms'])):.1f}",
        cell["by_hand"],
        in_times(cell["of_expert"], low, cell["of_expert_high"]) + (", within this run" if low is None else ""),
    )


def headline() -> Table:
    """Each script's three times, and attention beside flash-attn 4, as shares of an expert's speed."""
    table = experts()
    lines = [tuple(texts[place] for place in (0, 1, 2, 3, 5, 7)) for texts in table.texts()]
    every = [times_as_long(*found["flash-attn"]).partition(" ")[0] for found in by_shape()]
    kernels = f"attention in bf16, {len(every)} shapes; by hand: flash-attn 4"
    lines.append((kernels, "H200", *[NONE] * 3, f"{min(every).rstrip('×')}–{max(every)}"))
    wanted = ("workload", "GPU", "as written (ms)", "by trainstep (ms)", "by hand (ms)", "of an expert's speed [95 %]")
    return text_table("readme-results", table.caption, wanted, lines)


TABLES = {
    "scripts": partial(scripts, "cpu-run.json"),
    "scripts-gpu": partial(scripts, "h200-scripts.json"),
    "experts": experts,
    "readme-results": headline,
}
