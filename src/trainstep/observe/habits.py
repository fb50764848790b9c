"""Settings left on and habits that slow every step, each with the name of its finding.

torch's getters say which are on, and the syntax trees of the user's files which line sets them.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainstep.observe.lines import owner_of, shown_line

if TYPE_CHECKING:
    from trainstep.observe.log import RankLog

GRAPHS, SENDS, LIMIT, UNUSED = "keeps-graphs", "sends-often", "recompile-limit", "finds-unused"
REVERSIBLE = ("anomaly-detection", "deterministic-algorithms", "distributed-debug")
"""Settings that can be kept off from outside."""
WRITTEN = {
    "anomaly-detection": ("set_detect_anomaly", "detect_anomaly", "set_anomaly_enabled"),
    "deterministic-algorithms": ("use_deterministic_algorithms", "set_deterministic_debug_mode", "deterministic"),
    "distributed-debug": ("TORCH_DISTRIBUTED_DEBUG", "set_debug_level"),
    "launch-blocking": ("CUDA_LAUNCH_BLOCKING",),
    "own-profiler": ("profile", "emit_nvtx", "emit_itt"),
    UNUSED: ("find_unused_parameters",),
}
"""Setting → calls, arguments and environment variables that set it."""
MOSTLY = 0.5  # share of the steps above which it is a habit


def settings_on(modules: Sequence[Any]) -> list[str]:
    """Settings of torch, and of models that are called, that are on now."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    has_ranks = dist.is_available() and dist.is_initialized()
    is_on = {
        "anomaly-detection": torch.is_anomaly_enabled(),
        "deterministic-algorithms": torch.are_deterministic_algorithms_enabled(),
        "distributed-debug": has_ranks and dist.get_debug_level() == dist.DebugLevel.DETAIL,
        "launch-blocking": torch.cuda.is_initialized() and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
        "own-profiler": torch._C._autograd._profiler_enabled(),
        UNUSED: any(map(_finds_unused, modules)),
    }
    return [name for name, on in is_on.items() if on]


def _finds_unused(module: Any) -> bool:
    """True if DistributedDataParallel looks for parameters without gradients and finds none, as its own account has it
    of the first ten updates and every hundredth."""
    own = object.__getattribute__(module, "__dict__")
    if not own.get("find_unused_parameters") or own.get("static_graph"):
        return False
    return not own["logger"]._get_ddp_logging_data().ints_map.get("unused_parameter_size")


def user_files() -> list[str]:
    """Files of the user's own modules that were imported; no code of theirs runs."""
    modules = [each for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]
    files = [object.__getattribute__(each, "__dict__").get("__file__") for each in modules]
    return [os.path.realpath(each) for each in files if isinstance(each, str) and owner_of(each) == "user"]


def habits_of(log: RankLog) -> Iterator[tuple[str, str | None, float]]:
    """Each habit of a rank's script with its line, if it is the user's own, and how often it was seen: a share of the
    steps, or a count."""
    steps = log.steps[1:]
    on = Counter(tag for step in steps for tag in step.tags)
    for name in WRITTEN:
        if on[name] >= max(1, (1 if name == UNUSED else MOSTLY) * len(steps)):
            place = place_of(name, log.facts.get("files", ()))
            yield name, shown_line(*place) if place else None, on[name] / len(steps)
    for number, times in sorted(log.facts.get("noted", {}).items(), key=lambda each: -each[1]):
        made = log.lines[int(number)]
        if made["call"] != SENDS or times > MOSTLY * len(steps):
            user = made.get("user_file")
            yield made["call"], shown_line(user or made["file"], made["user_line" if user else "line"]), times
    for file, line, function in (each["limit"] for each in log.recompilations if "limit" in each):
        yield LIMIT, f"{shown_line(file, line)} in {function}", 1


def place_of(name: str, files: Sequence[str]) -> tuple[str, int] | None:
    """File and line that set it."""
    for file in files:
        with suppress(OSError, SyntaxError, ValueError):
            if values := setting_values(ast.parse(Path(file).read_bytes()), name):
                return file, min(values)
    return None


def setting_values(tree: ast.AST, name: str) -> dict[int, ast.expr | None]:
    """Lines that set it → what they set it to, if they say so; without those that switch it off."""
    found: dict[int, ast.expr | None] = {}
    for node in ast.walk(tree):
        written, value = None, None
        if isinstance(node, ast.Call):
            written = getattr(node.func, "attr", getattr(node.func, "id", None))
            values = [*node.args, *(each.value for each in node.keywords if each.arg == "mode")]
            value = values[0] if values else None
        elif isinstance(node, ast.keyword):
            written, value = node.arg, node.value
        elif isinstance(node, ast.Constant) and str(node.value).isupper():  # a variable of the environment
            written = node.value
        if written in WRITTEN[name] and not (isinstance(value, ast.Constant) and not value.value):
            found.setdefault(node.lineno, value)  # type: ignore[attr-defined]
    return found
