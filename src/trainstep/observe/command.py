"""The words after `trainstep run` and its options: the script that they name, or an error with the words to type."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainstep.base.errors import UsageError

LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate", "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner"),
)
"""Programs and modules that start a process per rank."""
OF_PYTHON = ("", ".py", ".pyw", ".pyc", ".pyz", ".zip")
"""Endings of files that Python runs."""
CAN_MEASURE = "import sys, importlib.util as util; sys.exit(sys.version_info < (3, 11) or not util.find_spec('torch'))"
"""Exit code 0 of an interpreter that can have the observer."""
EXPECTED = "expected a script: trainstep run [options] python train.py …, train.py …, or -m module …"

NO_FILE = "names no script; write the code into a file, and type trainstep run python train.py"


@dataclass(frozen=True)
class Command:
    """A command to run."""

    target: str  # the script's path, or a module's name
    is_module: bool
    arguments: tuple[str, ...]
    interpreter: str  # its whole path
    options: tuple[str, ...] = ()  # the interpreter's own, up to the one that begins a module, such as -m or -mname
    called: str = ""  # the interpreter's name in `sys.orig_argv`; by default its path

    @property
    def name(self) -> str:
        """Name of the script in reports."""
        return self.target if self.is_module else Path(self.target).name

    @property
    def words(self) -> list[str]:
        """Command line."""
        is_attached = self.is_module and self.options[-1].endswith(f"m{self.target}")
        script = [] if is_attached else [self.target]
        return [self.called or self.interpreter, *self.options, *script, *self.arguments]


def command_of(words: Sequence[str], flags: Sequence[str] = ()) -> Command:
    """The script that words name, as after `trainstep run` and its flags.

    Raises:
        UsageError: no script, one that is not there, a program that starts one, or an interpreter without torch. The
            message has the words to type, with the flags.
    """
    if not words:
        raise UsageError(f"nothing to run; {EXPECTED}")
    is_named = _is_interpreter(words[0])
    interpreter, called = _interpreter(words, flags) if is_named else (sys.executable, "")
    options, module, rest = _options(words[is_named:])
    if not is_named and sys.orig_argv[1:4] == ["-u", "-m", "trainstep"]:
        options = ["-u", *options]  # torchrun starts scripts with it
    if not module and not rest:
        raise UsageError(f"{words[0]} is given no script; {EXPECTED}")
    target, rest = module or rest[0], rest[not module :]
    path, begin = Path(target), len(words) - len(rest)
    is_program = begin == 1 and (path.exists() or shutil.which(target) or "=" in target) and not _is_script(path)
    if path.name in LAUNCHERS or is_program:
        raise _misplaced(words, flags, begin)
    if not module and not path.exists():
        raise UsageError(f"there is no script {target}; {EXPECTED}")
    if not module and path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{target} is a folder without a __main__.py; {EXPECTED}")
    return Command(target, bool(module), tuple(rest), interpreter, tuple(options), called)


def _interpreter(words: Sequence[str], flags: Sequence[str]) -> tuple[str, str]:
    """The path of the interpreter that is the first word, and the word itself where it leads there."""
    there = shutil.which(words[0])
    # Without a path it is the one that has trainstep, as in an environment that is not activated.
    found = sys.executable if words[0] in ("python", "python3") else there
    if found is None:
        raise UsageError(f"there is no {words[0]}; {EXPECTED}")
    path = str(Path.cwd() / found)
    if path != sys.executable and subprocess.run([path, "-c", CAN_MEASURE], capture_output=True).returncode:
        instead = shlex.join(["trainstep", "run", *flags, "python", *words[1:]])
        raise UsageError(
            f"{words[0]} is older than Python 3.11 or has no torch; type {instead} for the Python that has trainstep"
        )
    return path, words[0] if there == found else ""


def script_at(words: Sequence[str], begin: int = 0) -> int | None:
    """Find the script in words: at Python or at a file of it, else at the option for a module; None without one."""
    files = (at for at in range(begin, len(words)) if _is_interpreter(words[at]) or re.fullmatch(r"\S+\.py", words[at]))
    return next(files, next((at for at in range(begin, len(words)) if words[at] in ("-m", "--module")), None))


def _is_interpreter(word: str) -> bool:
    """True for `python`, `python3.12` or a path to one."""
    return Path(word).name.startswith("python") and not word.endswith(".py")


def _is_script(path: Path) -> bool:
    """True for a file that is Python by its name or by its first line, and for all but files, which are not read."""
    if not path.is_file():
        return path.exists()
    with path.open("rb") as file:
        first = file.readline(200)
    if first.startswith(b"#!") and path.suffix != ".py":
        return b"python" in first
    return path.suffix in OF_PYTHON and not first.startswith(b"\x7fELF")


def _misplaced(words: Sequence[str], flags: Sequence[str], begin: int) -> UsageError:
    """The error for a program or launcher before the word `begin`, behind which trainstep belongs."""
    ours, program, place = ["trainstep", "run", *flags], shutil.which(words[0]), script_at(words, begin)
    name = Path(words[begin - 1]).name
    if name in LAUNCHERS:
        script = ["train.py"] if place is None else list(words[place:])
        script = ["-m", *script[1:]] if script[0].startswith("-") else script
        instead = [*words[:place], "--module" if "deepspeed" in name else "-m", *ours, *script]
    elif place is not None:
        is_kept = _is_interpreter(words[place]) or words[0] == "uv"  # what only Python itself can run is run by it
        instead = [*(words[:place] if is_kept else ()), *ours, *words[place:]]
    elif program is not None and _is_script(Path(program)):
        instead = [*ours, program, *words[1:]]
    elif program is not None or words[0].endswith("sh"):
        again, inside = shlex.join([*(() if program else ["bash"]), *words]), shlex.join([*ours, "python", "train.py"])
        return UsageError(f"{words[0]} is no Python script: write {inside} in it for python train.py, and type {again}")
    else:
        return UsageError(f"{words[0]} is no Python script; {EXPECTED}")
    return UsageError(f"trainstep run takes a script: for {words[begin - 1]} type {shlex.join(instead)}")


def _options(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The interpreter's options at the beginning of words, the module that they name, if any, and the words after.

    Raises:
        UsageError: an option that names no script, or one under which Python does not find the observer.
    """
    options, rest = list[str](), list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word.startswith("--"):
            options += [word, *rest[:1]]  # --check-hash-based-pycs, the only one
            rest = rest[1:]
            continue
        for at, letter in enumerate(word[1:], 1):
            value = word[at + 1 :]
            if letter in "IES":
                raise UsageError(f"python -{letter} leaves out what brings the observer into a script; leave it out")
            if letter == "m":
                if not value and not rest:
                    raise UsageError(f"-m is given no module; {EXPECTED}")
                return [*options, word], value or rest[0], rest if value else rest[1:]
            if letter == "c":
                raise UsageError(f"-c {NO_FILE}")
            if letter in "XW":
                options += [word] if value else [word, *rest[:1]]
                rest = rest if value else rest[1:]
                break
        else:
            if word == "-":
                raise UsageError(f"- {NO_FILE}")
            options.append(word)
    return options, "", rest
