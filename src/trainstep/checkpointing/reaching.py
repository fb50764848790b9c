"""Variables outside of a block that its forward names: globals, closures, attributes of classes and functions.

A forward can read and change state that no module holds. A code object lists the names that its function uses, so the
search starts at the functions of a block's modules and follows names: from a function to globals of its file and to its
closure, from a class to its attributes, from a global to functions of another file. It compares names alone. So it
finds more than a call uses, and misses attributes that `getattr` reads by a computed name.

The search leaves out torch, numpy, the standard library and installed packages, except files that define a class of the
block. It runs once for a block, and each call reads the variables anew.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import nn

OWN = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""Attributes that torch gives a module: parameters, hooks and the like, which a forward does not change."""
PLAIN = (int, float, str, bool, type(None))
"""Types of values that cannot change."""
_STANDARD = (sysconfig.get_paths()["stdlib"], "<frozen")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_LEFT_OUT = frozenset({"torch", "trainstep", "numpy", "triton"})
_CODE = (FunctionType, type, ModuleType, nn.Module)
_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, type(functools.cache(len)))
_HOLDERS = (functools.partial, MethodType, BuiltinFunctionType)
_BUILT_IN = (OrderedDict, dict, list, set, deque, tuple, frozenset)
_COLLECTIONS = (dict, list, set, deque, SimpleNamespace)
_MAKING = frozenset({"__new__", "__init__", "__post_init__"})


class Variables:
    """Some variables of a file, a class or a closure's cell.

    Args:
        owner: the file's globals, the class, or the cell.
        label: names a variable in an error message, with `{}` for its own name.
        cell: the name of the cell's variable.
    """

    def __init__(self, owner: dict[str, Any] | type | CellType, label: str, cell: str = "") -> None:
        self._owner, self._label, self._cell = owner, label, cell
        self._tried: set[str] = set()
        self.names: list[str] = []
        """The variables that `read` returns."""

    def place(self, name: str) -> str:
        """Name the variable in an error message."""
        return self._label.format(name)

    def add(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield the values of new names, and read them from now on where they are no functions, classes or modules."""
        there = self._there()
        for name in there.keys() & set(names) - self._tried:
            self._tried.add(name)
            if isinstance(there[name], MethodType) or not (
                isinstance(there[name], _CODE) or hasattr(type(there[name]), "__get__")
            ):
                self.names.append(name)
            yield name, there[name]

    def read(self) -> dict[str, Any]:
        """Return the values by name."""
        there = self._there()
        return {name: there[name] for name in self.names if name in there}

    def write(self, contents: dict[str, Any]) -> None:
        """Give the variables the values that `read` returned."""
        for name in self.names:
            if isinstance(self._owner, CellType):
                self._owner.cell_contents = contents[name]
            elif isinstance(self._owner, type):
                setattr(self._owner, name, contents[name]) if name in contents else delattr(self._owner, name)
            elif name in contents:
                self._owner[name] = contents[name]
            else:
                self._owner.pop(name, None)

    def _there(self) -> Mapping[str, Any]:
        if isinstance(self._owner, CellType):
            return {self._cell: self._owner.cell_contents}
        return self._owner if isinstance(self._owner, dict) else vars(self._owner)


class Reach:
    """State that the code of some modules names.

    Args:
        modules: the modules of a block.
        forwards: functions of theirs that an attribute `forward` hides.
        arguments: of a call. Their code counts; what it holds by itself does not, as it may be of one batch.
    """

    def __init__(self, modules: Iterable[nn.Module], forwards: Iterable[Any], arguments: Iterable[Any]) -> None:
        self.names = {"forward"}
        """Every name in the code."""
        self.values: list[tuple[str, Any]] = []
        """Objects that functions hold: default arguments and attributes, and where."""
        self._variables: dict[int, Variables] = {}
        self._open: dict[type | ModuleType, Variables] = {}  # any name in the code may be one of theirs
        self._seen: dict[int, Any] = {}  # holds each object, so that no other gets its id
        self._holds = True
        self._ahead: list[tuple[str, Any]] = [("forward", each) for each in forwards]
        modules = list(modules)
        self._files = {kind.__module__ for each in modules for kind in type(each).__mro__}
        for module in modules:
            self._follow_class(type(module))
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            attributes = (value for name, value in vars(module).items() if name == "forward" or name not in OWN)
            self._ahead += [(f"an attribute of {type(module).__name__}", each) for each in (*hooks, *attributes)]
        self._search()
        self._holds = False
        self._ahead += [("an argument", each) for each in arguments]
        self._search()
        self.variables = [each for each in self._variables.values() if each.names]
        """Variables to read before a call."""
        self._seen.clear()

    def _search(self) -> None:
        while self._ahead:
            while self._ahead:
                self._follow(*self._ahead.pop())
            for variables in [*self._open.values()]:
                self._add(variables, self.names - _MAKING)

    def _add(self, variables: Variables, names: Iterable[str]) -> None:
        self._ahead += [(variables.place(name), value) for name, value in variables.add(names)]

    def _in(self, owner: Any, label: str, cell: str = "") -> Variables:
        return self._variables.setdefault(id(owner), Variables(owner, label, cell))

    def _follow(self, place: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._follow_function(place, value)
        elif isinstance(value, _HOLDERS):
            self._ahead += [(place, each) for each in (*held(value), getattr(value, "__wrapped__", None))]
        elif isinstance(value, _WRAPPERS):
            inner = (getattr(value, name, None) for name in ("__func__", "__wrapped__", "fget", "func"))
            self._ahead += [(place, each) for each in inner]
        elif isinstance(value, ModuleType):
            if self._is_followed(value.__name__, getattr(value, "__file__", None)):
                self._open[value] = self._in(vars(value), f"the global {{}} of {value.__name__}")
        elif isinstance(value, type):
            self._follow_class(value, is_made=not issubclass(value, nn.Module))
        elif isinstance(value, (tuple, frozenset)) or is_container(value):
            if not isinstance(value, (tuple, frozenset, *_COLLECTIONS)):
                self._follow_class(type(value))
            self._ahead += [(place, each) for each in members(value)]

    def _hold(self, place: str, value: Any) -> None:
        if self._holds:
            self.values.append((place, value))
            self._ahead.append((place, value))

    def _follow_class(self, kind: type, *, is_made: bool = False) -> None:
        for each in kind.__mro__:
            if self._is_followed(each.__module__, _file(each)):
                self._open[each] = self._in(each, f"{each.__name__}.{{}}")
                functions = (name for name, value in vars(each).items() if isinstance(value, FunctionType))
                special = {name for name in functions if name.startswith("__")}  # Python calls them without a name
                self._add(self._open[each], special if is_made else special - _MAKING)

    def _follow_function(self, place: str, function: FunctionType) -> None:
        self._ahead.append((place, vars(function).get("__wrapped__")))
        module = function.__globals__.get("__name__")  # a wrapper's __module__ is that of what it wraps
        if not self._is_followed(module, function.__code__.co_filename):
            return
        names, title = set(_names(function.__code__)), function.__qualname__
        self.names |= names
        self._ahead += [(name, sys.modules[name]) for name in names & sys.modules.keys()]  # imported in the function
        self._add(self._in(function.__globals__, f"the global {{}} of {module}"), names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if self._holds and cell != CellType():  # it has a value
                self._add(self._in(cell, f"{{}} in the closure of {title}", name), [name])
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(each) not in PLAIN for each in defaults):
            self._hold(f"a default argument of {title}", defaults)
        if vars(function) or not _is_installed(function.__code__.co_filename):
            self._hold(f"an attribute of {title}", vars(function))

    def _is_followed(self, module: str | None, file: str | None) -> bool:
        return not _is_left_out(module or "", file) and (module in self._files or not _is_installed(file))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _file(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _is_installed(file: str | None) -> bool:
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)


def _is_left_out(module: str, file: str | None) -> bool:
    """Return True for torch, numpy, triton, trainstep and the standard library, whose compiled modules have no file."""
    package = module.partition(".")[0]
    if package in _LEFT_OUT or file is None:
        return package in _LEFT_OUT | sys.stdlib_module_names
    return file.startswith(_STANDARD) and not _is_installed(file)


def is_container(value: Any) -> bool:
    """Return whether it is a collection, or an object of the user's or of a library other than torch and numpy."""
    return _has_members(type(value))  # type: ignore[arg-type] # a class can be hashed


@functools.lru_cache(1024)
def _has_members(kind: type) -> bool:
    if issubclass(kind, _COLLECTIONS):
        return True
    if issubclass(kind, (*_CODE, *_HOLDERS)) or _is_left_out(kind.__module__, _file(kind)):
        return False
    if any("__call__" in vars(each) for each in kind.__mro__) and _is_installed(_file(kind)):
        return False  # a library's object that is called may hold compiled code
    return kind.__dictoffset__ != 0 or bool(slots_of(kind))  # type: ignore[arg-type]  # a class can be hashed


def held(value: Any) -> tuple[Any, ...]:
    """Return what a partial function or a bound method holds; empty for another object."""
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return value.__self__, getattr(value, "__func__", None)
    return ()


def members(value: Any) -> Iterable[Any]:
    """Return the members of a collection, values alone of a dict, or an object's attributes."""
    found = contents_of(value)
    return list(found.values()) if isinstance(found, dict) else found


def built_in(value: Any) -> Any:
    """Return the type of Python's own that a collection is of, or None.

    Its methods read and write what the collection holds. A subclass's may do something else: that of transformers'
    `ACT2FN` makes a module anew of the class that is held.
    """
    return next((each for each in _BUILT_IN if isinstance(value, each)), None)


def contents_of(value: Any) -> Any:
    """Return what an object holds: a dict of its items or attributes, else a list."""
    if (kind := built_in(value)) is None:
        return attributes_of(value)
    return dict(kind.items(value)) if issubclass(kind, dict) else list(kind.__iter__(value))


def attributes_of(target: Any) -> dict[str, Any]:
    """Return an object's attributes by name, with those in slots."""
    names = slots_of(type(target))  # type: ignore[arg-type] # a class can be hashed
    slots = {name: getattr(target, name) for name in names if hasattr(target, name)}
    return {**getattr(target, "__dict__", {}), **slots}


@functools.lru_cache(1024)
def slots_of(kind: type) -> frozenset[str]:
    """Return the names of a class's attributes that lie in slots."""
    parts = [vars(each) for each in kind.__mro__ if "__slots__" in vars(each)]
    return frozenset(name for each in parts for name, value in each.items() if isinstance(value, MemberDescriptorType))
