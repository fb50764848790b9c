"""The shape of the package: who may import whom, no circles, how docstrings begin, and what starting must not cost."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import trainstep

PACKAGE = Path(trainstep.__file__).parent

LEVELS = (
    ("base",),
    ("rows",),
    ("step", "attention", "fused", "checkpointing", "parallel"),
    ("measure", "plan", "check"),
    ("report",),
    ("ladder", "observe", "bench", "train"),
    ("commands",),
)
"""The rooms, from the ground up: each may import from its own level and from those below."""
LEVEL = {room: height for height, rooms in enumerate(LEVELS) for room in rooms}
ROWS_ALONE = {"report": {"base", "rows"}, "plan": {"base", "rows"}}
"""Rooms that know numbers and no tensors: all that they may import."""
APART = ("observe", "train")
"""Rooms that import no other room of their level: the instruments that two rooms use belong to `measure`."""
MOST_LINES = {"src": 41_079, "tests": 45_321}
"""Lines of code without blanks, comments and docstrings, `tools` among `tests`; only a decision raises them."""

NO_SUBJECT = {
    *("What", "Of", "As", "Those", "That", "Whether", "One"),
    *("Which", "Why", "How", "Where", "When", "It", "Its"),
}
"""First words that name nothing: the reader has to guess the noun."""
LONG, HELD = 150, 50
"""Lines of code of a file, and of these in functions, from which on it needs comments that say why."""
LIGHT = tomllib.loads(Path(__file__).with_name("structure.toml").read_text("utf-8"))["light"]
"""Statement → packages that it must not load."""
TOOLS = re.compile(r"#\s*(noqa|fmt:|type:|pragma)")


def name_of(path):
    return ".".join(("trainstep", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def room_of(module):
    """The folder at the top that a module is in; empty for the two files there."""
    return FILES[module].relative_to(PACKAGE).parts[0] if FILES[module].parent != PACKAGE else ""


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


def test_sixteen_rooms_and_two_files():
    assert {room_of(module) for module in FILES} - {""} == set(LEVEL)
    assert {path.name for path in FILES.values() if path.parent == PACKAGE} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("room", LEVEL)
def test_imports_point_down(room):
    for module in FILES:
        if room_of(module) != room:
            continue
        rooms = {room_of(imported) for imported in GRAPH[module]} - {room, ""}
        upwards = {other for other in rooms if LEVEL[other] > LEVEL[room]}
        assert not upwards, f"{module} imports from {sorted(upwards)}, which stand above {room}"
        assert rooms <= ROWS_ALONE.get(room, rooms), f"{module} imports from {sorted(rooms)}"
        beside = {other for other in rooms if room in APART and LEVEL[other] == LEVEL[room]}
        assert not beside, f"{module} imports from {sorted(beside)}; move the shared names below"


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
    """Kernels apart, none has more than 600 lines."""
    kernels = {
        f"attention/{room}/{name}.py" for room in ("triton", "hopper") for name in ("forward", "backward", "dq", "dkdv")
    }
    lengths = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in FILES.values()}
    assert {name: length for name, length in lengths.items() if length > 600 and name not in kernels} == {}


@pytest.mark.parametrize("folder", MOST_LINES)
def test_the_budget_of_lines_holds(folder):
    folders = {"tests": ("tests", "tools")}.get(folder, (folder,))
    lines = sum(code_lines(path) for each in folders for path in (PACKAGE.parents[1] / each).rglob("*.py"))
    assert lines <= MOST_LINES[folder], f"{folder} has {lines} lines of code, {MOST_LINES[folder]} are the most"


def code_lines(path):
    """How many lines of a file hold code."""
    return len(code_of(path.read_text()))


def code_of(text):
    """The lines that hold code."""
    prose, code = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return code - prose


NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def docstrings(tree):
    """Texts that stand alone: of modules, classes, functions, and below the names that they explain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def without_subject(source):
    """Lines of docstrings that begin with a word of `NO_SUBJECT`."""
    return [line for line, text in docstrings(ast.parse(source)) if re.match(r"[\w-]*", text.strip())[0] in NO_SUBJECT]


@pytest.mark.parametrize("room", LEVEL)
def test_docstrings_begin_with_a_verb_or_a_noun(room):
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for line in without_subject(path.read_text())
    ]
    assert not found, "begin these docstrings with a verb or a noun that has a name"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""What a rank sent."""', [1]),
        ('class A:\n    """A rank."""\n\n    b: int\n    """Of one rank."""', [5]),
        ('def is_late() -> bool:\n    """Whether it is."""', [2]),
        ('def is_late() -> bool:\n    """True if the rank is late. Whether it is killed, `kill` says."""', []),
        ('"""One-sided copies between GPUs."""', []),
        ('"""Ones and zeros."""', []),
    ],
)
def test_the_first_word_is_seen_wherever_a_docstring_stands(source, lines):
    assert without_subject(source) == lines


def lacks_comments(text):
    """Whether a file has much code in functions, and nowhere in them a comment, those for tools apart."""
    code, inside = code_of(text), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside.update(range(node.lineno + 1, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    notes = [each for each in tokens if each.type == tokenize.COMMENT and not TOOLS.match(each.string)]
    is_long = len(code) > LONG and len(code & inside) > HELD
    return is_long and not any(each.start[0] in inside for each in notes)


def test_long_files_say_why_in_comments():
    assert [name for name, path in sorted(FILES.items()) if lacks_comments(path.read_text())] == []


@pytest.mark.parametrize(
    ("line", "top", "lacks"),
    [
        ("    # Late ranks are waited for.", "", False),
        ("    pass  # noqa: PIE", "", True),
        ("    pass", "# Why.", True),
    ],
)
def test_only_comments_in_functions_count(line, top, lacks):
    assert lacks_comments("\n".join([top, "def f():", line, *["    x = 1"] * 200])) is lacks
    assert not lacks_comments("\n".join([top, "def f():", line, *["    x = 1"] * 20]))


def loaded_after(statement):
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


@pytest.mark.parametrize("statement", LIGHT)
def test_starting_stays_light(statement):
    assert not loaded_after(statement) & set(LIGHT[statement])


def test_public_names():
    assert set(trainstep.__all__) <= set(dir(trainstep))
    for name in trainstep.__all__:
        assert getattr(trainstep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        trainstep.nonsense  # noqa: B018
