"""Grids on the command line: flags that take several values, made from a configuration's own fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from dataclasses import field
from typing import Annotated, Any, Literal

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from trainstep.config import check_value


def commas(item: Any) -> Any:
    """The type of a flag that takes several values with commas between them: a tuple of `item`."""
    choices = typing.get_args(item) if typing.get_origin(item) is Literal else ()
    one = "|".join(choices) if choices else item.__name__.upper()

    def parse(words: list[str]) -> tuple[Any, ...]:
        values = tuple((str if choices else item)(word) for word in words[0].split(","))
        for value in values:
            check_value(item, value, where="a value")
        return values

    return Annotated[
        tuple[item, ...],
        PrimitiveConstructorSpec(
            nargs=1,
            metavar=f"{one}[,…]",
            instance_from_str=parse,
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda values: [",".join(map(str, values))],
        ),
    ]


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            docs[statement.target.id] = " ".join(str(text).split())
    return docs


def grid_of(cls: type) -> type:
    """A dataclass with the fields, defaults and docs of `cls`, each taking several values: the axes of a grid."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    fields = [
        (each.name, Annotated[commas(hints[each.name]), arg(help=docs[each.name])], field(default=(each.default,)))
        for each in dataclasses.fields(cls)
    ]
    return dataclasses.make_dataclass(f"{cls.__name__}Grid", fields, frozen=True)
