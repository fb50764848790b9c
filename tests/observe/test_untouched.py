"""`trainstep run` leaves no trace: scripts run plain and under it, in equal folders, and end equal to the bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "untouched"
FENCE = re.compile(r"^```python *(.*?)$\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHER = re.compile(r"(?<=0x)[0-9a-f]{6,}|^USDT:.*\n|(?<=^W)[0-9]{4} \S+ [0-9]+", re.MULTILINE)
"""Addresses of objects, and the time and process in lines of torch's profiler and log: other ones in any two runs."""
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LOADS = """
import importlib.abc, json, pickle, runpy, sys
class Blocks(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        assert name.partition(".")[0] != "trainstep", "the file asks for trainstep"
sys.meta_path.insert(0, Blocks())
sys.path.insert(0, ".")
import torch
main = sys.argv.pop(1)
if 'if __name__ == "__main__"' in open(main).read():
    vars(sys.modules["__main__"]).update(runpy.run_path(main, run_name="read"))
for name in sys.argv[1:]:
    match name.rpartition(".")[2]:
        case "pt": torch.load(name, weights_only=False)
        case "pkl": pickle.load(open(name, "rb"))
        case "pt2": torch.export.load(name)
        case "ts": torch.jit.load(name)
        case "json": json.load(open(name))
"""


@dataclass(frozen=True)
class Script:
    """A folder with a script, and the words after `python` that run it."""

    name: str
    marks: set[str]
    files: dict[str, str]
    words: list[str]


def scripts_of(path: Path) -> list[Script]:
    """The scripts of a document, as the README beside it describes."""
    found = []
    for section in path.read_text().split("\n## ")[1:]:
        name, files, variants, marks = section.partition("\n")[0], dict(USUAL), {}, set[str]()
        for head, code in FENCE.findall(section):
            words = head.split()
            if words and words[0].startswith("as="):
                variants[words[0].removeprefix("as=")] = code, set(words[1:])
            else:
                named = [word for word in words if "." in word]
                files[named[0] if named else "train.py"] = code
                marks |= {word for word in words if "." not in word}
        runs = re.search(r"^Runs: (.*)$", section, re.MULTILINE)
        command = runs[1].split() if runs else ["train.py"]
        base = files.get("train.py", "")
        for variant, (code, own) in variants.items() or [("", ("", set()))]:
            place = re.search(r"^( *)\.\.\.\n", base, re.MULTILINE) if variant else None
            if place:
                inner = "".join(place[1] + line if line.strip() else line for line in code.splitlines(keepends=True))
                files = files | {"train.py": base[: place.start()] + inner + base[place.end() :]}
            found.append(Script(variant or name, marks | own, files, command))
    return found


USUAL: dict[str, str] = {}
USUAL["usual.py"] = FENCE.search((SCRIPTS / "README.md").read_text())[2]
ALL = {path.stem: scripts_of(path) for path in sorted(SCRIPTS.glob("*.md")) if path.stem != "README"}


def run(script: Script, folder: Path, before: list[str], *, ranks: bool = False) -> dict[str, object]:
    """Everything that a run of a script leaves, in a fresh folder at the same path as the last time's.

    Args:
        before: the words in front of the script's, which begin with a program.
    """
    work, own = folder / "work", Path(tempfile.gettempdir()) / f"own-{os.getpid()}"  # short: sockets' names are
    for each in (work, own):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    for name, text in script.files.items():
        place, _, member = name.partition(":")
        (work / place).parent.mkdir(exist_ok=True)
        if member:
            with zipfile.ZipFile(work / place, "w") as archive:
                archive.writestr(zipfile.ZipInfo(member), text)
        else:
            (work / place).write_text(text)
    for path in work.rglob("*"):  # compiled files hold the time of their source
        os.utime(path, (1e9, 1e9))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TMPDIR": str(own)}
    environment |= {name: str(own / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    ended = subprocess.run(
        [*before, *script.words], cwd=work, env=environment, capture_output=True, timeout=300, input=b"some text"
    )
    shutil.rmtree(own, ignore_errors=True)
    texts = {name: OTHER.sub("", getattr(ended, name).decode()) for name in ("stdout", "stderr")}
    if ranks:  # a file each, as the two write at once; torchrun's own lines have times in them
        texts = {f"rank {path.parent.name}": path.read_text() for path in (folder / "ranks").rglob("stdout.log")}
        assert len(texts) == 2
        shutil.rmtree(folder / "ranks")
    files = {str(path.relative_to(work)): content_of(path) for path in sorted(work.rglob("*")) if path.is_file()}
    return {"exit code": ended.returncode, **texts, **files}


def content_of(path: Path) -> object:
    """Bytes; of a trace, whose events have times, how often each name is in it.

    A pickle names storages by their address, which is left out.
    """
    if path.name.endswith(".trace.json"):
        events = json.loads(path.read_text())["traceEvents"]
        return Counter((each["ph"], each.get("cat"), each["name"]) for each in events)
    return re.sub(rb"\d{12,}", b"", path.read_bytes()) if path.suffix == ".pkl" else path.read_bytes()


def differences(script: Script, folder: Path, *, ranks: bool = False) -> dict[str, tuple[object, object]]:
    """Everything that differs between a plain run and one under `trainstep run`: its name, and both."""
    launch = [sys.executable, *LAUNCH, "--redirects=1", f"--log-dir={folder / 'ranks'}"] if ranks else [sys.executable]
    plain = run(script, folder, launch, ranks=ranks)
    # With -P, Python takes no file trainstep.py of the working folder for `-m trainstep`.
    observer = ["-m", "trainstep", "run", "--out", str(folder / "out")]
    observer = [*launch, *observer] if ranks else [sys.executable, "-P", *observer, sys.executable]
    under = run(script, folder, observer, ranks=ranks)
    if not ranks:
        under["stderr"] = under["stderr"].partition("\n trainstep run · ")[0]
    return {
        name: (plain.get(name), under.get(name))
        for name in plain.keys() | under.keys()
        if plain.get(name) != under.get(name)
    }


def cases(wanted: str) -> list[object]:
    """The scripts with a mark, or all, as parameters of a test."""
    found = []
    for kind, scripts in ALL.items():
        for script in scripts:
            if wanted in ("all", *script.marks):
                mark = pytest.mark.gpu if "gpu" in script.marks else pytest.mark.thorough
                marks = () if "quick" in script.marks and wanted == "all" else mark
                found.append(pytest.param(script, id=f"{kind}-{script.name}", marks=marks))
    return found


@pytest.mark.parametrize("script", cases("all"))
def test_a_script_is_untouched(script, tmp_path):
    assert differences(script, tmp_path) == {}
    kept = [str(path) for path in (tmp_path / "work").rglob("*") if path.suffix in (".pt", ".pkl", ".pt2", ".ts")]
    kept += map(str, (tmp_path / "work").glob("*.trace.json"))
    if kept:
        main = next(iter(set(script.words) & set(script.files)), "usual.py")
        command = [sys.executable, "-c", LOADS, main, *kept]
        subprocess.run(command, cwd=tmp_path / "work", check=True, timeout=300)


@pytest.mark.distributed
@pytest.mark.parametrize("script", cases("ranks"))
def test_two_ranks_are_untouched(script, tmp_path):
    assert differences(script, tmp_path, ranks=True) == {}
