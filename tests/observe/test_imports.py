"""What is called once the script has imported a module."""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from trainstep.observe.imports import after_import

NAME = "imported_by_a_script"
SOURCE = "HERE = 1\ndef __getattr__(name):\n    return f'{name} on demand'\n"


class Lazy(ModuleType):
    """Loads itself when something is asked of it, as wandb's modules do; its own class until it is loaded."""

    def __getattribute__(self, name: str) -> object:
        values = object.__getattribute__(self, "__dict__")
        if not values.get("asked"):
            values["asked"] = True
            values["__spec__"].loader.exec_module(self)
            self.__class__ = ModuleType
        return object.__getattribute__(self, name)


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(NAME, None)


def test_a_call_follows_the_import() -> None:
    seen: list[str] = []
    after_import(NAME, lambda: seen.append(sys.modules[NAME].anything))
    assert not seen
    importlib.import_module(NAME)
    assert seen == ["anything on demand"]


def test_a_module_that_is_there_is_called_at_once() -> None:
    importlib.import_module(NAME)
    seen: list[str] = []
    after_import(NAME, lambda: seen.append("called"))
    assert seen == ["called"]


def test_what_is_called_off_is_not_called() -> None:
    seen: list[str] = []
    after_import(NAME, lambda: seen.append("called"))()
    importlib.import_module(NAME)
    assert not seen


@pytest.mark.parametrize("looks", [1, 2])
def test_a_module_that_is_only_looked_for_is_called_when_it_comes(looks: int) -> None:
    """Libraries ask whether torch is there long before they import it."""
    seen: list[str] = []
    after_import(NAME, lambda: seen.append("first"))
    after_import(NAME, lambda: seen.append("second"))
    for _ in range(looks):
        assert importlib.util.find_spec(NAME) is not None
    assert not seen
    module = importlib.import_module(NAME)
    assert sorted(seen) == ["first", "second"]
    assert type(module.__spec__) is importlib.machinery.ModuleSpec
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    assert "get_code" not in vars(module.__loader__)


def test_no_frame_of_ours_is_there_while_the_module_loads(tmp_path: Path) -> None:
    """Neither its stack nor the traceback of its failure has one; a failed import is no import."""
    source = "import sys, traceback\nFILES = [each.filename for each in traceback.extract_stack()]\n{}"
    file, seen = tmp_path / f"{NAME}.py", list[str]()
    after_import(NAME, lambda: seen.append("called"))
    file.write_text(source.format("raise ValueError(FILES)"))
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="test_imports") as failed:
        importlib.import_module(NAME)
    assert not seen
    assert "observe/imports.py" not in f"{failed.value}{[str(each.path) for each in failed.traceback]}"
    file.write_text(source.format("#" * 30))
    module = importlib.import_module(NAME)
    assert seen == ["called"]
    assert not [each for each in module.FILES if "observe/imports.py" in each]


def lazy() -> ModuleType:
    """The module, which loads when something is asked of it."""
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__class__ = Lazy
    sys.modules[NAME] = module
    return module


def test_a_module_that_is_loaded_later_has_its_attributes_when_the_call_is_made() -> None:
    """Its class hides the module's own `__getattr__`, by which numpy has `random` and `fft`."""
    seen: list[str] = []
    after_import(NAME, lambda: seen.append(sys.modules[NAME].anything))
    module = lazy()
    assert not seen
    assert module.HERE == 1
    assert seen == ["anything on demand"]


def test_pythons_lazy_modules_are_called_when_they_load() -> None:
    seen: list[str] = []
    after_import(NAME, lambda: seen.append(sys.modules[NAME].anything))
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    assert not seen
    assert module.HERE == 1
    assert seen == ["anything on demand"]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_module_that_chooses_its_class_keeps_it(is_lazy: bool, tmp_path: Path) -> None:
    own = "import sys, types\nclass Own(types.ModuleType): pass\nHERE = 1\nsys.modules[__name__].__class__ = Own\n"
    (tmp_path / f"{NAME}.py").write_text(own)
    importlib.invalidate_caches()
    seen: list[str] = []
    after_import(NAME, lambda: seen.append(type(sys.modules[NAME]).__name__))
    module = lazy() if is_lazy else importlib.import_module(NAME)
    assert module.HERE == 1
    assert seen == ["Own"]
