"""The shape of the package: who may import whom, in every folder; no circles; and what starting must not cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trainstep

PACKAGE = Path(trainstep.__file__).parent

GROUND = {"errors", "stats", "precision", "budgets", "policies", "config", "hardware", "schemes", "kinds", "records"}
"""Lists, rows and statistics: no torch."""
STEP = {
    *("casting", "randomness", "batches", "workload", "training_step", "blocks"),
    *("checkpointing", "keeping", "offloading", "repeating", "updating", "model", "attention", "fused", "weights"),
}
"""What is run."""

MAY_IMPORT = {
    "errors": set(),
    "stats": set(),
    "cores": set(),
    "precision": set(),
    "budgets": set(),
    "randomness": set(),
    "batches": {"errors"},
    "policies": {"errors"},
    "config": {"errors", "precision"},
    "hardware": {"errors", "precision"},
    "schemes": {"config", "errors"},
    "kinds": {"stats"},
    "records": {"errors", "kinds"},
    "guards": {"errors"},
    "casting": {"errors", "precision"},
    "attention": {"attention/hopper", "attention/triton", "casting", "config", "errors", "precision"},
    "attention/triton": {"attention", "casting", "errors", "precision"},
    "attention/hopper": {"attention", "attention/triton", "errors"},
    "fused": {"errors", "fused/triton"},
    "fused/triton": {"attention/triton"},
    "model": {"attention", "config", "errors", "fused"},
    "blocks": set(),
    "keeping": {"errors"},
    "repeating": {"errors", "randomness"},
    "offloading": {"errors"},
    "checkpointing": {"blocks", "config", "errors", "keeping", "offloading", "policies", "repeating"},
    "weights": set(),
    "rebuilding": {"randomness", "weights"},
    "workload": {"attention", "config", "errors", "fused", "model", "precision", "randomness", "rebuilding"},
    "updating": {"blocks", "errors", "policies"},
    "training_step": {
        *("batches", "blocks", "casting", "checkpointing", "config", "errors", "policies", "precision", "updating"),
        *("weights", "workload"),
    },
    "parallel": {"blocks", "errors"},
    "parallel/transport": {"errors", "parallel"},
    "parallel/ddp": {"errors", "parallel", "parallel/transport"},
    "parallel/zero": {"blocks", "errors", "parallel", "parallel/ddp", "parallel/transport"},
    "parallel/fsdp": {"blocks", "errors", "parallel", "parallel/transport"},
    "measure": {"blocks", "casting", "config", "cores", "errors", "precision"},
    "measure/profile": {"blocks", "config", "errors", "measure"},
    "measure/allocations": {"blocks", "config", "errors", "measure", "measure/profile"},
    "peers": {"blocks", "errors", "parallel", "training_step"},
    "replicas": {
        "blocks",
        "casting",
        "config",
        "errors",
        "measure",
        "parallel",
        "parallel/fsdp",
        "peers",
        "schemes",
        "training_step",
    },
    "plan": GROUND,
    "bench": GROUND | STEP | {"bench/check", "measure", "measure/allocations", "measure/profile", "parallel", "plan"},
    "bench/check": GROUND | STEP | {"bench"},
    "bench/fit": GROUND | STEP | {"bench", "bench/check", "measure", "plan"},
    "bench/fused": GROUND | STEP | {"bench", "bench/check", "measure", "peers"},
    "bench/parallel": GROUND
    | STEP
    | {"bench", "bench/check", "measure", "measure/profile", "parallel", "plan", "replicas"},
    "bench/sweep": GROUND | {"bench"},
    "run/watch": GROUND | {"bench", "measure", "measure/allocations", "measure/profile"},
    "run/trial": {"batches", "bench/check", "blocks", "hardware", "run/watch"},
    "run/changes": GROUND | STEP | {"cores", "run/trial", "run/watch"},
    "run": GROUND | {"bench", "measure/profile", "run/trial", "run/watch"},
    "run/ladder": GROUND | {"bench", "bench/check", "run", "run/changes", "run/trial", "run/watch"},
    "train": GROUND | STEP | {"guards", "measure", "parallel", "parallel/fsdp", "parallel/zero", "plan", "replicas"},
    "report": GROUND | {"report/charts", "report/subjects"},
    "report/charts": GROUND | {"report"},
    "report/subjects": GROUND | {"report", "report/charts"},
}
"""Room (a folder, or a module at the top) → rooms it may import; those of `ABOVE` stand above all."""
ABOVE = {"__init__", "__main__", "analysis", "cli", "commands", "watching"}


def name_of(path):
    return ".".join(("trainstep", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def room_of(module):
    """The deepest folder that a module is in, or its own name at the top."""
    folder = FILES[module].relative_to(PACKAGE).parent
    return folder.as_posix() if folder.parts else FILES[module].stem


def imports_of(path):
    """The modules of the package that a file imports, in functions too; what only type checkers read does not count."""
    found = set()

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                found.update(name if name in FILES else child.module for name in names)
            elif isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            visit(child)

    visit(ast.parse(path.read_text()))
    return found & set(FILES)


GRAPH = {module: imports_of(path) - {module} for module, path in FILES.items()}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_one_way(room):
    inside = [module for module in FILES if room_of(module) == room]
    assert inside, f"no room called {room}"
    for module in inside:
        rooms = {room_of(imported) for imported in GRAPH[module]} - {room}
        assert rooms <= MAY_IMPORT[room], f"{module} imports {sorted(rooms - MAY_IMPORT[room])}"


def test_every_room_is_guarded():
    assert {room_of(module) for module in FILES} == set(MAY_IMPORT) | ABOVE


def test_there_is_no_circle_of_imports():
    done, path = set(), []

    def walk(module):
        assert module not in path, f"a circle: {' → '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        path.append(module)
        for imported in sorted(GRAPH[module]):
            walk(imported)
        path.pop()
        done.add(module)

    for module in sorted(GRAPH):
        walk(module)


def test_a_file_is_one_idea():
    """Kernels apart, none has more than 400 lines."""
    kernels = {
        f"attention/{room}/{name}.py" for room in ("triton", "hopper") for name in ("forward", "backward", "dq", "dkdv")
    }
    lengths = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in FILES.values()}
    assert {name: length for name, length in lengths.items() if length > 400 and name not in kernels} == {}


def loaded_after(statement):
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import trainstep", {"torch", "triton", "pandas", "bokeh", "numpy", "tyro", "rich"}),
        ("import trainstep.cli", {"torch", "triton", "pandas", "bokeh", "numpy"}),
        (
            "import trainstep.precision, trainstep.schemes, trainstep.hardware, trainstep.config",
            {"torch", "numpy"},
        ),
        (
            "import trainstep.bench.sweep.rows, trainstep.bench.sweep.run",
            {"torch", "submitit", "pynvml", "numpy", "pandas", "bokeh"},
        ),
        (
            "import trainstep.plan.rows, trainstep.plan.measured",
            {"torch", "numpy", "pandas", "bokeh"},
        ),
        ("import trainstep.train.history, trainstep.commands.report, trainstep.report.page", {"torch", "triton"}),
        ("import trainstep.records, trainstep.kinds", {"torch", "numpy", "pandas", "bokeh"}),
        ("import trainstep.report.page", {"torch", "pandas", "bokeh"}),
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
