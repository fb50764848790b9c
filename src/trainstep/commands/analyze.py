"""`trainstep analyze`: the main job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainstep.commands.options import OneModel
from trainstep.commands.output import run_and_report


@dataclass(frozen=True, kw_only=True)
class Analyze(OneModel):
    """Measure a training step, explain it, make it faster rung by rung, and write the report."""

    out: Path = Path("results/analyze")
    """Folder for results.jsonl, tables/, report.html and the profiler's trace (for ui.perfetto.dev)."""

    def run(self) -> int:
        from trainstep.analysis import analysis_records

        source = self.source()
        records = analysis_records(source, self.step_config(), steps=self.steps, trace=self.out / "trace.json.gz")
        return run_and_report(records, self.out, f"analyze {source.name}")
