"""trainstep: where a Transformer training step spends its time and memory, made faster, and proven.

The public names below are imported on first use, so `import trainstep` costs nothing.
"""

from typing import TYPE_CHECKING

from trainstep.base.lazy import on_first_use

if TYPE_CHECKING:
    from trainstep.base.config import SIZES, ModelConfig, StepConfig
    from trainstep.base.errors import UsageError
    from trainstep.bench.analysis import analyze
    from trainstep.observe.watching import lightning_callback, trainer_callback, watch
    from trainstep.report.page import Report
    from trainstep.step.workload import Workload

__all__ = ["SIZES", "ModelConfig", "Report", "StepConfig", "UsageError", "Workload", "analyze"]
__all__ += ["lightning_callback", "trainer_callback", "watch"]

_HOME = dict.fromkeys(("SIZES", "ModelConfig", "StepConfig"), "base.config")
_HOME |= dict.fromkeys(("lightning_callback", "trainer_callback", "watch"), "observe.watching")
_HOME |= {
    "Report": "report.page",
    "UsageError": "base.errors",
    "Workload": "step.workload",
    "analyze": "bench.analysis",
}
__getattr__, __dir__ = on_first_use(__name__, _HOME)
