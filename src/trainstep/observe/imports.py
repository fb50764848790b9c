"""Imports in the script's process: a call once a module is there, and modules of ours beside the script's own.

This file imports nothing that Python has not loaded by itself before a script begins, so that whatever the script
imports is loaded by the script.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_bootstrap: Any = sys.modules["_frozen_importlib"]
_files: Any = sys.modules["_frozen_importlib_external"]
_weakref: Any = sys.modules["_weakref"]
PACKAGE = "trainstep"


class _Finder:
    """Finds one module as the other finders would, and makes a call once it is loaded."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name, self._call = name, call
        self._codes: list[object] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module as the other finders do."""
        if name != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        finders = [each.find_spec for each in others if hasattr(each, "find_spec")]
        spec: Any = next(filter(None, (find(name, path, target) for find in finders)), None)
        if isinstance(getattr(spec, "loader", None), _files.FileLoader):
            spec.__class__ = _told_of(self, type(spec))
            self._look_at_code(spec, spec.loader)
        return spec

    def _look_at_code(self, spec: Any, loader: Any) -> None:
        """Notice a lazy module, which loads itself past the import system: its code is dropped when it has run."""

        def get_code(name: str) -> Any:
            del loader.get_code
            if another is not None:
                loader.get_code = another
            code = loader.get_code(name)
            self._codes.append(_weakref.ref(code, ran))
            return code

        def ran(_: object) -> None:
            if "_initializing" not in vars(spec):
                self.loaded(spec, is_lazy=True)

        another = vars(loader).get("get_code")
        loader.get_code = get_code

    def loaded(self, spec: Any, *, is_lazy: bool = False) -> None:
        """Make the call, unless the module's code has failed."""
        spec.__class__ = _bootstrap.ModuleSpec
        module = sys.modules.get(self._name)
        if self not in sys.meta_path or module is None:
            return
        self.forget()
        if is_lazy and type(module).__module__ != self._name:
            # Until it has its own class back, a lazy module hides the `__getattr__` by which numpy has `random`.
            module.__class__ = type(sys)
        self._call()

    def forget(self) -> None:
        """Look no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _told_of(finder: _Finder, kind: Any) -> type:
    """Make a class of specs that tell a finder when the import system notes that the module is loaded.

    Python sets `_initializing` to False after the module's code, so no frame of this file is on the stack meanwhile.
    """

    class ModuleSpec(kind):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_initializing" and not value:
                finder.loaded(self)

    return ModuleSpec


def after_import(name: str, call: Callable[[], object]) -> Callable[[], object]:
    """Call once the module of this name has been imported, at once where it is there; returns what calls that off."""
    if name in sys.modules:
        call()
        return lambda: None
    finder = _Finder(name, call)
    sys.meta_path.insert(0, finder)
    return finder.forget


class Beside:
    """A context in which our modules are imported as if the script had none, and stay out of the way of the script's.

    A script may have a file `tomllib.py` or `trainstep.py`. Inside the context its folders come last on `sys.path`, and
    modules that it has loaded under such a name are put aside. Afterwards the script has its own back, and those of
    ours that lie under a name of the script's are no longer in `sys.modules`. Imports inside functions of our modules
    enter the context by themselves.

    Args:
        root: the folder of our package.
        added: entries that PYTHONPATH has added to `sys.path`, which has no folder of the script's yet.
    """

    def __init__(self, root: str, added: Sequence[str]) -> None:
        self._root = root
        self._installed = [each for each in sys.path if each not in added]
        self._path = [*self._installed, *(each for each in sys.path if each in added)]
        self._ours: dict[str, ModuleType] = {}  # those under names of the script's
        self._theirs: dict[str, ModuleType] = {}
        self._depth = 0
        self._builtins = {**vars(sys.modules["builtins"]), "__import__": self._import}

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._was = sys.path[:], set(sys.modules), sys.dont_write_bytecode
        folders = self._folders()
        self._theirs = self._under({name for name in sys.modules if self._is_theirs(name, folders)})
        self._swap(self._theirs, self._ours)
        sys.path[:] = self._path
        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        sys.meta_path.remove(self)
        path, before, sys.dont_write_bytecode = self._was
        sys.path[:] = path
        folders = self._folders()
        new = {name.partition(".")[0] for name in sys.modules if name not in before or name in self._ours}
        self._ours = self._under({name for name in new if self._is_found(name, folders)})
        self._swap(self._ours, self._theirs)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the modules of our package in its own folder, with `_import` as their `__import__`."""
        if name.partition(".")[0] != PACKAGE:
            return None
        spec: Any = _files.PathFinder.find_spec(name, path or [self._root.rpartition("/")[0]])
        if spec is not None and type(spec.loader) is _files.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.builtins = self._builtins
        return spec

    def _import(self, name: str, *rest: Any, **options: Any) -> Any:
        if self._depth or (name in sys.modules and not self._ours and not self._theirs):
            return __import__(name, *rest, **options)
        with self:
            return __import__(name, *rest, **options)

    def _folders(self) -> list[str]:
        """Folders of the script's own on `sys.path`."""
        return [each for each in sys.path if each not in self._installed]

    def _is_theirs(self, name: str, folders: Sequence[str]) -> bool:
        """True for a loaded module from the script's folders that has the name of one which we may import.

        A whole package that is also installed, such as a second numpy, is the one to use.
        """
        spec: Any = getattr(sys.modules[name], "__spec__", None)
        if "." in name or spec is None or not spec.has_location or not spec.origin:
            return False
        folder = spec.origin.rpartition("/")[0]
        if spec.submodule_search_locations is not None:
            folder = folder.rpartition("/")[0]
        if folder not in folders or spec.origin == f"{self._root}/__init__.py":
            return False
        if name == PACKAGE or name in sys.stdlib_module_names:
            return True
        return spec.submodule_search_locations is None and bool(_files.PathFinder.find_spec(name, self._installed))

    def _is_found(self, name: str, folders: Sequence[str]) -> bool:
        """True if the script would find another module than ours under a name."""
        found: Any = _files.PathFinder.find_spec(name, folders)
        own: Any = getattr(sys.modules.get(name), "__spec__", None)
        return found is not None and own is not None and found.origin != own.origin

    @staticmethod
    def _under(names: set[str]) -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}

    @staticmethod
    def _swap(gone: dict[str, ModuleType], come: dict[str, ModuleType]) -> None:
        for name in gone:
            del sys.modules[name]
        sys.modules.update(come)


class _Loader(_files.SourceFileLoader):  # type: ignore[misc]
    """Loads a module of ours with builtins of its own."""

    builtins: dict[str, Any]

    def exec_module(self, module: ModuleType) -> None:
        """Execute it."""
        vars(module)["__builtins__"] = self.builtins
        super().exec_module(module)
