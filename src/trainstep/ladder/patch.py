"""What was kept, as a diff of the user's files: only changes that are a line there, at places where the script was seen
to make what they change. Everything else is told as lines to add.

An edit is made on the syntax tree's positions, never by searching text, and a file that no longer parses is left out.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.ladder.changes.reasons import with_few_workers, workers_here
from trainstep.observe.lines import owner_of

Settings = Mapping[str, Any]


@dataclass
class Patch:
    """Texts of files with what was kept written into them, and what could not be written."""

    texts: dict[str, str] = field(default_factory=dict)  # path → new text
    written: list[str] = field(default_factory=list)  # rungs
    left: list[str] = field(default_factory=list)

    def diff(self, root: Path) -> str:
        """As `git apply` and `patch -p1` take it, with paths from `root` where they are below it."""
        found = []
        for path, text in sorted(self.texts.items()):
            own = Path(path)
            name = own.relative_to(root).as_posix() if own.is_relative_to(root) else own.as_posix().lstrip("/")
            before, after = (each.splitlines(keepends=True) for each in (own.read_text(encoding="utf-8"), text))
            for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
                found.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
        return "".join(found)


def patch_of(script: Path, kept: Sequence[str], settings: Settings) -> Patch:
    """Write each change into the files.

    Args:
        script: its file.
        kept: the names of rungs.
        settings: where the script makes what.
    """
    names = [name for name in kept if name in WRITTEN]
    while True:
        texts: dict[str, str] = {}
        failed = _write(names, script, settings, texts)
        if failed is None:
            return Patch(texts, names, [name for name in kept if name not in names])
        names.remove(failed)


def _write(names: Sequence[str], script: Path, settings: Settings, texts: dict[str, str]) -> str | None:
    """Write all of them; the name of one that cannot be written, if there is any.

    Arguments first, which move no line; then new lines from the end of a file upwards, so that no place is moved.
    """
    files = _Files(texts)
    edits = []
    for name in names:
        places = list(_places(name, script, settings))
        if not places:
            return name
        edits += [(WRITTEN[name].adds_lines, -each["line"], name, each) for each in places]
    for _, _, name, place in sorted(edits, key=lambda edit: edit[:2]):
        if not WRITTEN[name].write(files, place):
            return name
    return None


def _places(name: str, script: Path, settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Where a change is to be written; a line without a file where that is not known."""
    unknown = {"file": "", "line": 0}
    found: list[Mapping[str, Any]] = []
    if name == "TF32 matmuls":
        found = [{"file": str(script.resolve()), "line": 0}]
    elif name == "loader workers":
        found = with_few_workers(settings)
    elif name == "pinned memory":
        found = [each for each in settings["loaders"] if not each["pin_memory"]]
    elif name == "bf16 autocast":
        found = list(settings["models"])
    else:
        set_already = name == "fused optimizer"
        found = [
            each if "file" in each else unknown
            for each in settings["optimizers"]
            if not (set_already and (each["fused"] or each["foreach"]))
        ]
        if not set_already and len(found) != 1:
            found = [unknown]
    yield from {(each["file"], each["line"]): each for each in found}.values()


class _Files:
    """Texts under edit."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def edit(self, path: str, change: Callable[[str, ast.Module], str | None]) -> bool:
        """Change one of the user's files; False where it is a library's, or what is looked for is not there."""
        if not path or owner_of(path) != "user":
            return False
        try:
            text = self._texts.get(path) or Path(path).read_text(encoding="utf-8")
            changed = change(text, ast.parse(text))
            if changed is None:
                return False
            ast.parse(changed)
        except (OSError, ValueError, SyntaxError):
            return False
        self._texts[path] = changed
        return True


def _tf32(files: _Files, place: Mapping[str, Any]) -> bool:
    """After the imports that begin with or before torch's."""

    def change(text: str, tree: ast.Module) -> str | None:
        imports = [number for number, each in enumerate(tree.body) if _imports_torch(each)]
        if not imports:
            return None
        last = imports[0]
        while last + 1 < len(tree.body) and isinstance(tree.body[last + 1], (ast.Import, ast.ImportFrom)):
            last += 1
        return _inserted(text, tree.body[last].end_lineno or 0, ["", 'torch.set_float32_matmul_precision("high")'])

    return files.edit(place["file"], change)


def _imports_torch(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and any(each.name == "torch" and not each.asname for each in node.names)


def _arguments(further: Mapping[str, Any], is_meant: Callable[[str, Any], bool]) -> Callable[[_Files, Any], bool]:
    """Writes arguments into the call at a place; those that are there already are given the new value."""

    def write(files: _Files, place: Mapping[str, Any]) -> bool:
        def change(text: str, tree: ast.Module) -> str | None:
            calls = [
                each
                for each in ast.walk(tree)
                if isinstance(each, ast.Call)
                and each.lineno <= place["line"] <= (each.end_lineno or 0)
                and is_meant(_name_of(each.func), place)
            ]
            return _with_arguments(text, calls[-1], further) if len(calls) == 1 else None

        return files.edit(place["file"], change)

    return write


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _with_arguments(text: str, call: ast.Call, further: Mapping[str, Any]) -> str:
    known = {each.arg: each.value for each in call.keywords}
    edits = [(_span(text, known[name]), repr(value)) for name, value in further.items() if name in known]
    new = ", ".join(f"{name}={value!r}" for name, value in further.items() if name not in known)
    if new:
        given = [*call.args, *(each.value for each in call.keywords)]
        ends = [_span(text, each)[1] for each in given]
        place = max(ends, default=_span(text, call)[1] - 1)
        edits.append(((place, place), f", {new}" if given else new))
    for (start, end), words in sorted(edits, reverse=True):
        text = text[:start] + words + text[end:]
    return text


def _span(text: str, node: ast.expr) -> tuple[int, int]:
    """Where a node begins and ends; the tree counts bytes of a line."""
    lines = text.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)


def _before_optimizer(lines: Callable[[str], list[str]]) -> Callable[[_Files, Any], bool]:
    """Writes lines about the model before the statement that makes its optimizer, which knows the model by name."""

    def write(files: _Files, place: Mapping[str, Any]) -> bool:
        names = place.get("names", [])

        def change(text: str, tree: ast.Module) -> str | None:
            if len(names) != 1:
                return None
            statement = _statement_at(tree, place["line"])
            if statement is None:
                return None
            indent = " " * statement.col_offset
            return _inserted(text, statement.lineno - 1, [f"{indent}{each}" for each in lines(names[0])])

        return files.edit(place["file"], change)

    return write


def _statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost one at a line."""
    found = [
        each for each in ast.walk(tree) if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or 0)
    ]
    return max(found, key=lambda each: (each.lineno, each.col_offset), default=None)


def _inserted(text: str, after: int, new: Sequence[str]) -> str:
    """New lines after so many."""
    lines = text.splitlines(keepends=True)
    if after and not lines[after - 1].endswith("\n"):
        lines[after - 1] += "\n"
    return "".join([*lines[:after], *(f"{each}\n" for each in new), *lines[after:]])


def _autocast(files: _Files, place: Mapping[str, Any]) -> bool:
    """Around the statement that calls the model, if it is a simple one; tensors that it then has are float32 again."""

    def change(text: str, tree: ast.Module) -> str | None:
        statement = _statement_at(tree, place["line"])
        simple = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
        if not isinstance(statement, simple) or not any(map(_imports_torch, tree.body)):
            return None
        lines = text.splitlines(keepends=True)
        first, last, column = statement.lineno, statement.end_lineno or 0, statement.col_offset
        own = "".join(lines[first - 1 : last])
        indent = lines[first - 1][:column]
        if indent.strip() or _spans_lines(statement) or sum(map(len, lines[:last])) > len(text):
            return None
        if any(each is not statement and _shares_line(each, first, last) for each in ast.walk(tree)):
            return None
        indented = "".join(f"    {line}" if line.strip() else line for line in own.splitlines(keepends=True))
        if not indented.endswith("\n"):
            indented += "\n"
        header = f'{indent}with torch.autocast("{place["device"]}", torch.bfloat16):\n'
        widened = [f"{indent}{name} = {name}.float()\n" for name in _narrow_names(statement, place["floats"])]
        return "".join([*lines[: first - 1], header, indented, *widened, *lines[last:]])

    return files.edit(place["file"], change)


def _narrow_names(statement: ast.stmt, floats: Sequence[bool] | None) -> list[str]:
    """The names that a statement gives to floating-point results of the one call in it, which autocast narrows.

    Args:
        floats: of each result whether it is such a tensor; None where it is something else than a tensor or several.
    """
    calls = sum(isinstance(each, ast.Call) for each in ast.walk(statement))
    if floats is None or calls != 1 or not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    (target,) = statement.targets
    names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    if not isinstance(statement.value, ast.Call) or len(names) != len(floats):
        return []
    return [name.id for name, is_float in zip(names, floats, strict=True) if is_float and isinstance(name, ast.Name)]


def _spans_lines(statement: ast.stmt) -> bool:
    """Whether a text in it goes over several lines, which another indentation would change."""
    texts = (ast.Constant, ast.JoinedStr)
    return any(isinstance(each, texts) and each.lineno != each.end_lineno for each in ast.walk(statement))


def _shares_line(node: ast.AST, first: int, last: int) -> bool:
    """Whether a statement begins or ends on one of these lines, beside one that has them to itself."""
    return isinstance(node, ast.stmt) and (first <= node.lineno <= last or node.end_lineno == first)


def _is_loader(name: str, place: Any) -> bool:
    return name == "DataLoader"


def _is_optimizer(name: str, place: Any) -> bool:
    return name == place["class"]


@dataclass(frozen=True)
class _Writer:
    write: Callable[[_Files, Any], bool]  # False where it cannot
    adds_lines: bool = True


WRITTEN: Mapping[str, _Writer] = {
    "TF32 matmuls": _Writer(_tf32),
    "fused optimizer": _Writer(_arguments({"fused": True}, _is_optimizer), adds_lines=False),
    "bf16 autocast": _Writer(_autocast),
    "channels last": _Writer(_before_optimizer(lambda name: [f"{name}.to(memory_format=torch.channels_last)"])),
    "compiled model": _Writer(_before_optimizer(lambda name: [f"{name}.compile()"])),
    "pinned memory": _Writer(_arguments({"pin_memory": True}, _is_loader), adds_lines=False),
    "loader workers": _Writer(_arguments({"num_workers": workers_here()}, _is_loader), adds_lines=False),
}
"""Rung → what writes it."""
