"""Lines of a script that keep something from step to step: where to look when memory grows.

The syntax trees of the user's files have them. No object of the script's is looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trainstep.observe.lines import shown_line

GROW = ("append", "appendleft", "extend", "add", "insert")
"""Methods by which a container grows."""
NUMBERS = ("item", "float", "int", "len", "str", "shape", "size", "numel", "time", "perf_counter")
"""Calls and attributes that give a number or a text: too little to make memory grow."""
_AROUND = ast.For | ast.While | ast.FunctionDef | ast.AsyncFunctionDef


def keeping_lines(places: Sequence[Sequence[str | int]]) -> list[str]:
    """Lines that keep something, in the loops and functions around these places, else anywhere in their files.

    Args:
        places: file and line of each call of the user's own that is under way where a step ends.
    """
    near, anywhere = dict[str, None](), dict[str, None]()
    for file, line in places:
        with suppress(OSError, SyntaxError, ValueError):
            tree = ast.parse(Path(str(file)).read_bytes())
            around = [each for each in ast.walk(tree) if isinstance(each, _AROUND)]
            around = [each for each in around if each.lineno <= int(line) <= (each.end_lineno or 0)]
            found = next(filter(None, ([*_kept_in(each, _own(each))] for each in reversed(around))), [])
            near |= {shown_line(str(file), each): None for each in found}
            anywhere |= {shown_line(str(file), each): None for each in _kept_in(tree, set())}
    return [*(near or anywhere)]


def _own(scope: ast.AST) -> set[str]:
    """Names that are made anew each time."""
    nodes = list(ast.walk(scope))
    grown = [each.target for each in nodes if isinstance(each, ast.AugAssign)]
    names = (each for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return {each.id for each in names if each not in grown}


def _kept_in(scope: ast.AST, own: set[str]) -> Iterator[int]:
    """Lines in which something grows that has none of these names, by more than numbers."""
    for node in ast.walk(scope):
        match node:
            case ast.keyword(arg="retain_graph", value=ast.Constant(value=True)):
                yield node.lineno
                continue
            case ast.Call(func=ast.Attribute(value=holder, attr=name), args=[*_, value]) if name in GROW:
                pass
            case ast.AugAssign(target=holder, op=ast.Add(), value=value):
                pass
            case ast.Assign(targets=[ast.Subscript(value=holder, slice=ast.expr() as key)], value=value):
                value = ast.Constant(0) if isinstance(key, ast.Constant) else value  # a setting, such as a group's "lr"
            case _:
                continue
        name = next((each.id for each in ast.walk(holder) if isinstance(each, ast.Name)), "")
        words = {getattr(each, "attr", getattr(each, "id", None)) for each in ast.walk(value)}
        is_small = isinstance(value, ast.Constant) or not words.isdisjoint(NUMBERS)
        if name and name not in own and not is_small:
            yield node.lineno
