"""Accepted changes, as a diff of the user's files: only changes that are a line there, at places where the script was
seen to make what they change. Everything else is told as lines to add.

An edit is made on the syntax tree's positions, never by searching text, and a file that no longer parses is left out.
Lines end where Python ends them (a carriage return ends one, a form feed does not). New lines end as the first does.
In the diff only a line feed ends a line, as for `git apply`, and its bytes are those of the file.
"""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstep.observe.lines import owner_of

if TYPE_CHECKING:
    from trainstep.ladder.change import Change, Settings

Place = Mapping[str, Any]
"""Place where a script makes something, with its file and line."""
UNKNOWN: Place = {"file": "", "line": 0}


@dataclass(frozen=True)
class Writer:
    """Function that writes a change into the user's files."""

    places: Callable[[Settings, Path], Iterable[Place]]
    """A script's settings and its file → where; `UNKNOWN` for what cannot be written."""
    write: Callable[[Files, Place], bool]
    """False where it cannot."""
    adds_lines: bool = True


def place_of(made: Place) -> Place:
    """Place where something was made, if that is known."""
    return made if "file" in made else UNKNOWN


@dataclass
class Patch:
    """Texts of files with what was accepted written into them, and what could not be written."""

    texts: dict[str, str] = field(default_factory=dict)  # path → new text
    written: list[Change] = field(default_factory=list)
    left: list[Change] = field(default_factory=list)

    def diff(self, root: Path) -> bytes:
        """Diff as `git apply` and `patch -p1` take it, with paths from `root` where they are below it."""
        found = bytearray()
        for path, text in sorted(self.texts.items()):
            own = Path(path)
            name = own.relative_to(root).as_posix() if own.is_relative_to(root) else own.as_posix().lstrip("/")
            name += "\t" * (" " in name)  # where a name with spaces ends
            before, encoding = own.read_bytes(), read_source(own)[1]
            old, new = (re.findall(rb"[^\n]*\n|[^\n]+", each) for each in (before, text.encode(encoding)))
            names = f"a/{name}".encode(), f"b/{name}".encode()
            for line in difflib.diff_bytes(difflib.unified_diff, old, new, *names):
                found += line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
        return bytes(found)


def read_source(path: Path) -> tuple[str, str]:
    """Text of a Python file with its line ends, and the encoding that it declares.

    Raises:
        SyntaxError: no such encoding.
    """
    data = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def lines_of(text: str) -> list[str]:
    """Lines with their ends, as Python counts them."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


def end_of_lines(text: str) -> str:
    """End of the first line."""
    return (re.search(r"\r\n|\r|\n", text) or ["\n"])[0]


def patch_of(script: Path, accepted: Sequence[Change], settings: Settings) -> Patch:
    """Write each change into the files.

    Args:
        script: its file.
        accepted: what the ladder ended with.
        settings: where the script makes what.
    """
    written = [each for each in accepted if each.write is not None]
    while True:
        texts: dict[str, str] = {}
        failed = _write(written, script, settings, texts)
        if failed is None:
            return Patch(texts, written, [each for each in accepted if each not in written])
        written.remove(failed)


def _write(changes: Sequence[Change], script: Path, settings: Settings, texts: dict[str, str]) -> Change | None:
    """Write all of them; one that cannot be written, if there is any.

    Arguments first, which move no line; then new lines from the end of a file upwards, so that no place is moved.
    """
    files = Files(texts)
    edits: list[tuple[tuple[bool, int], Writer, Change, Place]] = []
    for change in changes:
        assert change.write is not None
        places = {(each["file"], each["line"]): each for each in change.write.places(settings, script)}
        if not places:
            return change
        edits += [((change.write.adds_lines, -each["line"]), change.write, change, each) for each in places.values()]
    for _, writer, change, place in sorted(edits, key=lambda edit: edit[0]):
        if not writer.write(files, place):
            return change
    return None


class Files:
    """Texts under edit."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def edit(self, path: str, change: Callable[[str, ast.Module], str | None]) -> bool:
        """Change one of the user's files; False where it is a library's, or what is looked for is not there."""
        if not path or owner_of(path) != "user":
            return False
        try:
            text = self._texts.get(path) or read_source(Path(path))[0]
            changed = change(text, ast.parse(text))
            if changed is None:
                return False
            ast.parse(changed)
        except (OSError, ValueError, SyntaxError):
            return False
        self._texts[path] = changed
        return True


def imports_torch(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and any(each.name == "torch" and not each.asname for each in node.names)


def arguments(
    further: Mapping[str, Any], function: Callable[[Place], str], places: Callable[[Settings, Path], Iterable[Place]]
) -> Writer:
    """Writes arguments into the call of a function at each place; those that are there already get the new value."""

    def write(files: Files, place: Place) -> bool:
        def change(text: str, tree: ast.Module) -> str | None:
            calls = [
                each
                for each in ast.walk(tree)
                if isinstance(each, ast.Call)
                and each.lineno <= place["line"] <= (each.end_lineno or 0)
                and ast.unparse(each.func).rpartition(".")[2] == function(place)
            ]
            return with_arguments(text, calls[-1], further) if len(calls) == 1 else None

        return files.edit(place["file"], change)

    return Writer(places, write, adds_lines=False)


def with_arguments(text: str, call: ast.Call, further: Mapping[str, Any]) -> str:
    """The text with these arguments in the call; those that are there already get the new value."""
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


def replaced(text: str, node: ast.expr, words: str) -> str:
    """The text with words in a node's place."""
    start, end = _span(text, node)
    return text[:start] + words + text[end:]


def _span(text: str, node: ast.expr) -> tuple[int, int]:
    """Start and end of a node; the tree counts bytes of a line."""
    lines = lines_of(text)

    def place(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    return place(node.lineno, node.col_offset), place(node.end_lineno or 0, node.end_col_offset or 0)


def before_optimizer(line: str) -> Writer:
    """Writes a line about the model, `{}`, before the statement that makes its optimizer, which knows it by name."""

    def write(files: Files, place: Place) -> bool:
        names = place.get("names", [])

        def change(text: str, tree: ast.Module) -> str | None:
            statement = statement_at(tree, place["line"])
            indent = None if statement is None else indent_of(statement, lines_of(text))
            if len(names) != 1 or statement is None or indent is None:
                return None
            return inserted(text, statement.lineno - 1, [indent + line.format(names[0])])

        return files.edit(place["file"], change)

    def places(settings: Settings, script: Path) -> list[Place]:
        optimizers = settings["optimizers"]
        return [place_of(optimizers[0]) if len(optimizers) == 1 else UNKNOWN]

    return Writer(places, write)


def statement_at(tree: ast.Module, line: int) -> ast.stmt | None:
    """The innermost one at a line."""
    found = [
        each for each in ast.walk(tree) if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or 0)
    ]
    return max(found, key=lambda each: (each.lineno, each.col_offset), default=None)


def indent_of(statement: ast.stmt, lines: Sequence[str]) -> str | None:
    """Spaces before a statement; None where another one is before it in its line."""
    before = lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    return None if before.strip() else before.replace("\f", "")


def inserted(text: str, after: int, new: Sequence[str]) -> str:
    """New lines after so many."""
    lines, end = lines_of(text), end_of_lines(text)
    if after and not lines[after - 1].endswith(("\r", "\n")):
        lines[after - 1] += end
    return "".join([*lines[:after], *(f"{each}{end}" for each in new), *lines[after:]])
