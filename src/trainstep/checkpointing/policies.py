"""Policies that say what every block of a model does with its activations, as plain objects and as a JSON file. Imports
no torch.

`--checkpointing every-1` says one thing about all blocks. A `Policy` says for each block by itself which activations
are kept, which are computed again in backward, and which wait in host memory; `trainstep memory --fit` writes one, and
`--checkpointing @fit.json` uses it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trainstep.base.errors import UsageError
from trainstep.base.files import aside, read_json

FORMAT = "trainstep checkpointing 1"
"""Value of the file's `format`."""
Decoded = TypeVar("Decoded")
INSTEAD = "update after backward (memory --fit … --update-after-backward makes such a policy)"
"""Advice where updates in backward are refused."""


@dataclass(frozen=True)
class BlockPolicy:
    """Policy of a block for its activations; by default it keeps them all.

    Raises:
        UsageError: `kept` without `recompute`, a name in it that is not like `mm#0`, or an ordinal below zero.
    """

    recompute: bool = False
    """True if the block is run again in backward, so that only its inputs, and `kept`, are there in between."""
    kept: tuple[str, ...] = ()
    """Results that are not computed again, by operator and its number in the block's forward: `mm#0` is its first
    product, `trainstep::flash_forward#0` its first call of our kernel."""
    host: tuple[int, ...] = ()
    """Storages that wait in host memory: of those that a call of the block leaves for backward, parameters and buffers
    apart, those with these numbers, in the order in which they are saved. Of a block that is run again these are its
    inputs; compiled, they are its inputs and what is kept."""

    def __post_init__(self) -> None:
        if self.kept and not self.recompute:
            raise UsageError(f"a block's kept is {list(self.kept)}, but it is not computed again; set recompute")
        for name in self.kept:
            operator, _, number = name.rpartition("#")
            if not operator or not number.isdecimal():
                raise UsageError(f"a block's kept has {name!r}; expected an operator and its number, such as mm#0")
        if any(number < 0 for number in self.host):
            raise UsageError(f"a block's host is {list(self.host)}; expected numbers of 0 or more")

    @property
    def is_plain(self) -> bool:
        """True if the block does what it does without checkpointing."""
        return not self.recompute and not self.host


@dataclass(frozen=True)
class Policy:
    """A `BlockPolicy` for each block by its name, such as `blocks.3`; blocks without one keep everything."""

    blocks: Mapping[str, BlockPolicy] = field(default_factory=dict)
    update_in_backward: bool = False
    """True if the optimizer updates each block in backward, so that its gradients are freed
    (`trainstep.checkpointing.updating`). A training step does that; `Checkpointing` alone knows no optimizer."""

    def save(self, path: Path) -> None:
        """Write the policy as JSON, a line for each block; ranks may write and read one file at the same time."""
        lines = [
            f"    {json.dumps(name)}: {json.dumps(dataclasses.asdict(block))}" for name, block in self.blocks.items()
        ]
        update = '  "update_in_backward": true,\n' if self.update_in_backward else ""
        text = f'{{\n  "format": {json.dumps(FORMAT)},\n{update}  "blocks": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
        with aside(path) as draft, draft.open("x", encoding="utf-8") as file:
            file.write(text)

    @staticmethod
    def load(path: Path) -> Policy:
        """The policy in a file.

        Raises:
            UsageError: no such file, or another content than `save` writes.
        """
        content = read_json(path, Any, "the checkpointing policy ")
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            said = f"trainstep memory --fit writes one, with {FORMAT!r} as its format"
            raise UsageError(f"{path} is no checkpointing policy; {said}")
        blocks = content.get("blocks")
        if not isinstance(blocks, dict):
            raise UsageError(f"{path}: blocks is {blocks!r}; expected a table by block, such as blocks.0")
        own = {name: _decoded(block, BlockPolicy, f"{path}: {name}") for name, block in blocks.items()}
        update = _decoded(content.get("update_in_backward", False), bool, f"{path}: update_in_backward")
        return Policy(own, update)


def _decoded(content: Any, kind: type[Decoded], where: str) -> Decoded:
    import msgspec  # here: a command's help needs no files

    if kind is BlockPolicy and not (isinstance(content, dict) and set(content) <= {"recompute", "kept", "host"}):
        raise UsageError(f"{where} is {content!r}; expected recompute, kept and host")
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise UsageError(f"{where} is {content!r}: {error}") from error


def policy_of(checkpointing: str) -> Policy | None:
    """The policy that `@FILE` names; None for the name of a policy of all blocks alike, such as `every-1`.

    Raises:
        UsageError: the file cannot be read, or is no policy.
    """
    return Policy.load(Path(checkpointing[1:])) if checkpointing.startswith("@") else None
