"""The command line: parses the words into one of the commands, runs it, and turns a user's mistake into one line.

Each command is a dataclass in `trainstep.commands`: its fields are the flags, and `run` imports torch if needed, so
that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib.metadata
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from trainstep.base.errors import CollectiveError, UsageError, say
from trainstep.base.guards import STOPS, code_of
from trainstep.commands.bench import Bench
from trainstep.commands.compare import Compare
from trainstep.commands.machine import Info, Tune
from trainstep.commands.memory import Memory
from trainstep.commands.options import Common, parse_as
from trainstep.commands.output import BAD_INPUT, HOW, output_failed, steady_outputs
from trainstep.commands.plan import Plan
from trainstep.commands.profile import Analyze, Dtypes, Profile
from trainstep.commands.report import Report
from trainstep.commands.run import Run, split_script
from trainstep.commands.sweep import Sweep
from trainstep.commands.train import Train

COMMANDS: Any = (
    Run | Analyze | Bench | Dtypes | Memory | Plan | Profile | Sweep | Compare | Train | Report | Tune | Info
)

LEFT = "trainstep: interrupted"
ALONE = 1  # the exit code where other ranks are missing


def parse(words: Sequence[str]) -> Common:
    """The command that the words name, with its flags; otherwise as `parse_as`. What follows a script is its own."""
    if words[:1] != ["run"]:
        return parse_as(COMMANDS, words)
    own, script = split_script(words[1:])
    command: Any = parse_as(COMMANDS, ["run", *own])
    return dataclasses.replace(command, script=script)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code; docs/commands.md has the table of them."""
    with steady_outputs() as out, _leaving_at_once(is_program=words is None):
        code = _run(sys.argv[1:] if words is None else words)
        out.flush()
        if failure := output_failed(out):
            say(f"trainstep: {failure}", to_stderr=True)
            code = code or BAD_INPUT
    sys.exit(code)


def _run(words: Sequence[str]) -> int:
    if list(words) == ["--version"]:
        say(f"trainstep {importlib.metadata.version('trainstep')}")
        return 0
    try:
        is_silent = _is_rank() and os.environ["RANK"] != "0"  # the help, which is printed while words are parsed
        with contextlib.redirect_stdout(io.StringIO()) if is_silent else contextlib.nullcontext():
            command = parse(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except UsageError as error:
        return _say(str(error))
    if command.debug:
        logging.basicConfig()
        logging.getLogger("trainstep").setLevel(logging.DEBUG)
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # advice: the ladder measures what it is worth
    try:
        around = contextvars.copy_context()
        around.run(HOW.set, command.how)
        return around.run(command.run)
    except UsageError as error:
        if command.debug:
            raise
        return _say(str(error))
    except CollectiveError as error:
        say(f"trainstep: {error}", to_stderr=True)
        if command.debug:
            raise
        sys.stdout.flush()
        os._exit(ALONE)  # threads that wait for the missing rank too would be waited for
    except KeyboardInterrupt as error:
        say(LEFT, to_stderr=True)
        return code_of(error.args[0] if error.args else None)


def _is_rank() -> bool:
    """True if torchrun has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def _say(mistake: str) -> int:
    """Print a mistake; of ranks that make the same one, the first prints it. Returns the exit code.

    The others of its host end as if all were well: torchrun would end the first before it has spoken.
    """
    if _is_rank():
        from trainstep.parallel.process import is_first_to_say

        if not is_first_to_say(mistake):
            return 0 if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"] else BAD_INPUT
    say(f"trainstep: {mistake}", to_stderr=True)
    return BAD_INPUT


@contextlib.contextmanager
def _leaving_at_once(*, is_program: bool) -> Iterator[None]:
    """While nothing is measured (imports, printing), Ctrl-C ends the process at once: libraries that are being imported
    may swallow a KeyboardInterrupt, or fail later because of it. A terminal that closes while a program ends does not
    change its code."""

    def leave(number: int, frame: object) -> None:
        if os.getpid() == process:  # else a worker's end
            with contextlib.suppress(OSError):  # its reader, or its terminal, has gone
                os.write(2, f"{LEFT}\n".encode())
        os._exit(code_of(number))

    process = os.getpid()
    is_main = threading.current_thread() is threading.main_thread()
    # Others are not ours to handle, as with nohup. SIGTERM has to end a rank at once, also inside a collective.
    ours = (signal.SIGINT,) if _is_rank() else STOPS
    usual = (signal.default_int_handler, signal.SIG_DFL)
    before = {each: signal.getsignal(each) for each in ours if is_main and signal.getsignal(each) in usual}
    for each in before:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, signal.SIG_IGN if is_program and each == signal.SIGHUP else handler)


if __name__ == "__main__":
    main()
