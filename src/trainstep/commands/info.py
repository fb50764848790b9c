"""`trainstep info`: the environment."""

from __future__ import annotations

from dataclasses import dataclass

from trainstep.commands.options import Common


@dataclass(frozen=True, kw_only=True)
class Info(Common):
    """Print the environment, for bug reports."""

    def run(self) -> int:
        from trainstep.measure.environment import describe, gpu_state
        from trainstep.workload import resolve_device

        device = resolve_device("auto")
        for name, value in {**describe(device), **gpu_state(device)}.items():
            print(f"{name:18} {value}")
        return 0
