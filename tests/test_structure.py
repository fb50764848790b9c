"""The shape of the package: who may import whom, and what starting must not cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trainstep

PACKAGE = Path(trainstep.__file__).parent

MAY_IMPORT = {
    "errors": set(),
    "stats": set(),
    "precision": set(),
    "config": {"errors", "precision"},
    "schemes": {"config", "errors"},
    "phases": {"config"},
    "records": {"errors", "kinds", "stats"},
    "kinds": {"records"},
    "guards": {"errors"},
    "hardware": {"errors", "precision"},
    "casting": {"errors", "precision"},
    "plan": {"config", "errors", "hardware", "kinds", "precision", "records", "schemes"},
    "attention": {"casting", "config", "errors", "precision"},
    "model": {"attention", "config", "errors"},
    "blocks": {"errors"},
    "checkpointing": {"blocks", "config", "errors"},
    "parallel": {"blocks", "config", "errors"},
    "measure": {"casting", "config", "errors", "phases", "precision", "stats"},
    "workload": {"attention", "config", "errors", "model", "precision"},
    "training_step": {
        "blocks",
        "casting",
        "checkpointing",
        "config",
        "errors",
        "measure",
        "phases",
        "precision",
        "workload",
    },
    "replicas": {"blocks", "casting", "config", "measure", "parallel", "schemes", "training_step"},
    "bench": {
        "attention",
        "blocks",
        "casting",
        "config",
        "errors",
        "hardware",
        "kinds",
        "measure",
        "parallel",
        "phases",
        "plan",
        "precision",
        "records",
        "replicas",
        "report",
        "schemes",
        "stats",
        "training_step",
        "workload",
    },
    "train": {
        "casting",
        "config",
        "errors",
        "hardware",
        "guards",
        "kinds",
        "measure",
        "model",
        "parallel",
        "phases",
        "plan",
        "precision",
        "records",
        "replicas",
        "report",
        "schemes",
        "stats",
        "training_step",
        "workload",
    },
    "report": {"errors", "kinds", "precision", "records", "stats"},
}
"""Room → the rooms it may import. `analysis`, `commands` and `cli` sit on top and may import all."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("trainstep.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room):
    files = [path for path in PACKAGE.rglob("*.py") if room_of(path) == room]
    assert files, f"no room called {room}"
    for path in files:
        extra = imported_rooms(path) - MAY_IMPORT[room] - {room}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {sorted(extra)}"


def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import trainstep", {"torch", "triton", "pandas", "bokeh", "numpy", "tyro", "rich"}),
        ("import trainstep.cli", {"torch", "triton", "pandas", "bokeh", "numpy"}),
        ("import trainstep.plan.flops, trainstep.hardware, trainstep.config", {"torch", "numpy"}),
        ("import trainstep.precision, trainstep.schemes, trainstep.phases", {"torch", "numpy"}),
        (
            "import trainstep.bench.sweep.rows, trainstep.bench.sweep.processes, trainstep.bench.sweep.jobs",
            {"torch", "submitit", "pynvml", "numpy", "pandas", "bokeh"},
        ),
        (
            "import trainstep.plan.rows, trainstep.plan.check, trainstep.plan.calibration",
            {"torch", "numpy", "pandas", "bokeh"},
        ),
        (
            "import trainstep.records, trainstep.report.compare, trainstep.report.tables",
            {"torch", "pandas", "bokeh"},
        ),
        ("import trainstep.attention.eager", {"triton"}),
        ("import trainstep.parallel", {"torch"}),
    ],
)
def test_starting_stays_light(statement, forbidden):
    assert not loaded_after(statement) & forbidden


def test_public_names():
    assert set(trainstep.__all__) <= set(dir(trainstep))
    for name in trainstep.__all__:
        assert getattr(trainstep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trainstep.nonsense  # noqa: B018
