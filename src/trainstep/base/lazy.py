"""Public names of a package, imported on first use: `import trainstep` costs nothing, and oracles need no Triton."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, whose names stand in its modules: name → module, inside the package.

    Raises:
        AttributeError: from `__getattr__`, for a name that `home` lacks.
    """
    there = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        there[name] = getattr(import_module(f"{package}.{home[name]}"), name)  # the next look-up does not come here
        return there[name]

    return find, lambda: sorted({*there, *home})
