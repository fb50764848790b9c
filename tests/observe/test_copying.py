"""Copies of the working folder: a run that writes changes nothing of the folder itself."""

import os

import pytest
import torch

from trainstep.base.errors import UsageError
from trainstep.observe import copying
from trainstep.observe.copying import Copies, InPlace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder in which 100 bytes are a large file."""
    root = tmp_path / "work"
    for name, text in {"train.py": "x", "data/large.bin": "d" * 200, "out/ckpt.pt": "c" * 300, "out/log": "l"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        os.utime(root / name, (1e9, 1e9))  # long ago, so that a write is later for sure
    monkeypatch.chdir(root)
    monkeypatch.setattr(copying, "LARGE", 100)
    return root


def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


WRITES = {
    "appends": lambda place: (place / "data/large.bin").open("a").write("more"),
    "overwrites": lambda place: (place / "out/ckpt.pt").write_text("n"),
    "saves from C++": lambda place: torch.save({"a": torch.ones(3)}, str(place / "out/ckpt.pt")),
    "replaces": lambda place: (place / "out/log").replace(place / "data/large.bin"),
    "removes": lambda place: (place / "out/ckpt.pt").unlink(),
}


@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_run_changes_neither_the_folder_nor_the_next_copy(write, clones, folder, tmp_path, monkeypatch):
    if clones:  # as a file system does that can
        monkeypatch.setattr("fcntl.ioctl", lambda new, _, old: new.write(os.pread(old, 1000, 0)))
    before = contents(folder)
    copies = Copies(folder / "runs", folder / "runs/large")
    for number in "12":
        place = folder / "runs" / number
        copies.make(place)
        assert contents(place) == before
        assert (place / "data/large.bin").is_symlink() is not clones
        WRITES[write](place)
        assert contents(place) != before
    copies.close()
    assert not (folder / "runs/large").exists()
    assert {name: text for name, text in contents(folder).items() if not name.startswith("runs")} == before
    assert copies.linked.endswith(
        "(4.66e-07 GiB: data/large.bin, out/ckpt.pt) are copied once, and each run's copy links to that."
    )


def test_a_link_leads_where_it_did_or_into_the_copy(folder, tmp_path):
    (tmp_path / "beside").write_text("b")
    environment = folder / "env"
    environment.mkdir()
    (environment / "pyvenv.cfg").touch()
    links = {
        "relative": ("out/log", "out/log"),
        "absolute": (folder / "out/log", "out/log"),
        "out/up": ("../train.py", "train.py"),
        "outside": ("../beside", tmp_path / "beside"),
        "broken": ("nowhere", "nowhere"),
    }
    for name, (target, _) in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    place = tmp_path / "copy"
    Copies(folder / "runs", folder / "runs/large").make(place)
    for name, (_, target) in links.items():
        assert (place / name).readlink() == place / target
    assert (place / "env").readlink() == environment
    assert not (place / "pipe").exists()


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", 50), ("MOST_FILES", 3)])
def test_a_folder_with_too_much_is_refused_and_names_the_most_of_it(limit, value, folder, monkeypatch):
    monkeypatch.setattr(copying, limit, value)
    (folder / "images").mkdir()
    for number in range(30):
        (folder / "images" / str(number)).write_text("ab")
    with pytest.raises(UsageError, match=r"most of them in images; .* or give --in-place"):
        Copies(folder / "runs", folder / "runs/large")


def test_what_a_whole_run_has_only_read_is_linked_itself(folder, tmp_path):
    copies, place = Copies(folder / "runs", folder / "runs/large"), tmp_path / "copy"
    copies.make_small(place)
    (folder / "out/ckpt.pt").write_text("new" * 99)
    copies.add_large(place, copying.is_unchanged)
    assert (place / "data/large.bin").readlink() == folder / "data/large.bin"
    assert (place / "out/ckpt.pt").readlink() == folder / "runs/large/out/ckpt.pt"


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda root: (root / "out/log").open("a").write("m"), ["out/log"]),
        (lambda root: (root / "out/ckpt.pt").write_text("c" * 300), ["out/ckpt.pt"]),
        (lambda root: (root / "data/large.bin").unlink(), ["data/large.bin"]),
        (lambda root: (root / "out/new").write_text("n"), []),
        (lambda root: (root / "lock").touch(), []),
        (lambda root: (root / "runs/log").write_text("changed"), []),
        (lambda root: (root / "__pycache__/train.pyc").write_text("changed"), []),
    ],
)
def test_files_that_a_run_in_place_changed_are_named(write, named, folder):
    for name in ("lock", "runs/log", "__pycache__/train.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    before = InPlace(folder / "runs")
    write(folder)
    assert before.changed() == named


def test_files_that_a_run_wrote_into_its_copy_are_named(folder):
    copies, place = Copies(folder / "runs", folder / "large"), folder / "runs/copy"
    copies.make(place)
    for name, text in {"out/new": "n", "empty": "", "out/log": "more"}.items():
        (place / name).write_text(text)
    assert copies.written(place) == {"out/new"}
