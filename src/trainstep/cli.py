"""The command line: finds the command that the arguments name, runs it, and turns a user's mistake into one line.

The commands themselves are dataclasses in `trainstep.commands`. Torch is imported by the functions that need it, so
`--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union

import tyro
from tyro.conf import OmitArgPrefixes, subcommand

from trainstep.commands.analyze import Analyze
from trainstep.commands.bench import (
    BenchAttention,
    BenchCollectives,
    BenchLadder,
    BenchParallel,
    BenchStep,
    attention_defaults,
)
from trainstep.commands.compare import Compare
from trainstep.commands.dtypes import Dtypes
from trainstep.commands.info import Info
from trainstep.commands.memory import Memory, memory_grid
from trainstep.commands.options import ModelFlags, StepFlags, preset
from trainstep.commands.plan import DEFAULT_SIZE, DEFAULT_STEP, Plan, PlannedStep
from trainstep.commands.profile import Profile
from trainstep.commands.sweep import Sweep
from trainstep.commands.train import Train, train_defaults
from trainstep.commands.tune import Tune
from trainstep.config import SIZES
from trainstep.errors import UsageError

DESCRIPTION = "Shows where a Transformer training step spends its time and memory, makes it faster, and proves it."


@dataclass(frozen=True)
class _Choice:
    """The flags that choose the defaults of others."""

    size: str | None = None
    config: Path | None = None
    grid: str | None = None


def parse(arguments: Sequence[str]) -> Any:
    """The command that the arguments name, as one of the dataclasses above.

    Raises:
        UsageError: a size or a configuration that is not there.
        SystemExit: flags that cannot be parsed; what is wrong was printed. Also after --help.
    """
    one_model: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    plan: dict[str, Any] = {"model": ModelFlags(**vars(SIZES[DEFAULT_SIZE])), "step": PlannedStep(**vars(DEFAULT_STEP))}
    choice, _ = tyro.cli(_Choice, args=arguments, return_unknown_args=True, add_help=False)
    if set(arguments[:2]) & {"analyze", "ladder", "memory", "parallel", "profile"} and not {"-h", "--help"} & set(
        arguments
    ):
        model, step = preset(choice.size, choice.config)
        one_model = {"model": ModelFlags(**vars(model)), "step": StepFlags(**vars(step))}
        memory = {"model": ModelFlags(**vars(model)), "step": memory_grid(step)}
    if "plan" in arguments[:1] and (choice.size or choice.config):
        model, step = preset(choice.size, choice.config)
        plan = {
            "model": ModelFlags(**vars(model)),
            "step": PlannedStep(**vars(step if choice.config else DEFAULT_STEP)),
        }
    training: dict[str, Any] = {}
    if "train" in arguments[:1] and not {"-h", "--help"} & set(arguments):
        training = train_defaults(choice.size, choice.config)
    experiments: Any = Union[  # noqa: UP007 - for a type checker `|` joins values here, not types
        Annotated[BenchStep, subcommand("step")],
        Annotated[BenchLadder, subcommand("ladder", default=BenchLadder(**one_model))],
        Annotated[BenchAttention, subcommand("attention", default=attention_defaults(choice.grid))],
        Annotated[BenchCollectives, subcommand("collectives")],
        Annotated[BenchParallel, subcommand("parallel", default=BenchParallel(**one_model))],
    ]
    bench: Any = dataclasses.make_dataclass("Bench", [("experiment", experiments)])
    bench.__doc__ = "Run an experiment over a grid of cases."
    commands: Any = Union[  # noqa: UP007
        Annotated[Analyze, subcommand("analyze", default=Analyze(**one_model))],
        Annotated[bench, subcommand("bench")],
        Annotated[Dtypes, subcommand("dtypes")],
        Annotated[Memory, subcommand("memory", default=Memory(**memory))],
        Annotated[Plan, subcommand("plan", default=Plan(**plan))],
        Annotated[Profile, subcommand("profile", default=Profile(**one_model))],
        Annotated[Sweep, subcommand("sweep")],
        Annotated[Compare, subcommand("compare")],
        Annotated[Train, subcommand("train", default=Train(**training))],
        Annotated[Tune, subcommand("tune")],
        Annotated[Info, subcommand("info")],
    ]
    command = tyro.cli(commands, args=arguments, prog="trainstep", description=DESCRIPTION, config=(OmitArgPrefixes,))
    return getattr(command, "experiment", command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 no case could be measured, 2 the input was bad, 130 interrupted (what was
    measured is on disk)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in words:
        logging.basicConfig()
        logging.getLogger("trainstep").setLevel(logging.DEBUG)
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # advice: the ladder measures what it is worth
    try:
        sys.exit(parse(words).run())
    except UsageError as error:
        if "--debug" in words:
            raise
        print(f"trainstep: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
