"""The command line: parses the words into one of the commands, runs it, and turns a user's mistake into one line.

Each command is a dataclass in `trainstep.commands`: its fields are the flags, and `run` imports torch if needed, so
that `--help` answers at once.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from trainstep.commands.bench import Bench
from trainstep.commands.compare import Compare
from trainstep.commands.machine import Info, Tune
from trainstep.commands.memory import Memory
from trainstep.commands.options import Common, parse_as
from trainstep.commands.plan import Plan
from trainstep.commands.profile import Analyze, Dtypes, Profile
from trainstep.commands.sweep import Sweep
from trainstep.commands.train import Train
from trainstep.errors import UsageError, printable

COMMANDS: Any = Analyze | Bench | Dtypes | Memory | Plan | Profile | Sweep | Compare | Train | Tune | Info


def parse(words: Sequence[str]) -> Common:
    """The command that the words name, with its flags; otherwise as `parse_as`."""
    return parse_as(COMMANDS, words)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 no case could be measured, 2 the input was bad, 130 interrupted (what was
    measured is on disk)."""
    command = parse(sys.argv[1:] if words is None else words)
    if command.debug:
        logging.basicConfig()
        logging.getLogger("trainstep").setLevel(logging.DEBUG)
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # advice: the ladder measures what it is worth
    try:
        sys.exit(command.run())
    except UsageError as error:
        if command.debug:
            raise
        print(f"trainstep: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
