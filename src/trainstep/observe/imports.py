"""A call that is made when a module has been imported by whoever needs it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as the other finders would, and makes a call once it is loaded."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name, self._call = name, call
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module as the other finders do, with this as the loader."""
        if name != self._name:
            return None
        self.forget()
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as its own loader does; then call."""
        spec = module.__spec__
        assert spec is not None, "a module that is loaded has a spec"
        spec.loader = module.__loader__ = self._loader
        begun_as = type(module)
        self._loader.exec_module(module)
        if type(module) is begun_as:
            # One that is loaded when something is asked of it, as wandb makes numpy, becomes a plain module after this,
            # unless its code chose a class; until then its class hides the module's own `__getattr__`, by which numpy
            # has `random`. A plain module stays one.
            module.__class__ = ModuleType
        self._call()

    def forget(self) -> None:
        """Look no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def after_import(name: str, call: Callable[[], object]) -> Callable[[], object]:
    """Call once the module of this name has been imported, at once where it is there; returns what calls that off."""
    if name in sys.modules:
        call()
        return lambda: None
    finder = _AfterImport(name, call)
    sys.meta_path.insert(0, finder)
    return finder.forget
