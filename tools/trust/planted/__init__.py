"""Injected bugs and right variants, listed in `cases.toml`: each is an expression in the names of its module."""

import tomllib
from pathlib import Path
from typing import Any

CASES = tomllib.loads(Path(__file__).with_name("cases.toml").read_text("utf-8"))


def table(names: dict[str, Any], kind: str) -> dict[str, Any]:
    """A table of the module that has these names: what each case is → the case."""
    listed = CASES[names["__name__"].rpartition(".")[2]][kind]
    return {what: eval(expression, names) for what, expression in listed.items()}
