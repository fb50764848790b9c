"""Every JSON and TOML file is read by one reader: what is none, or never ends, is one line that names it."""

import os

import pytest

from trainstep.attention.tuned import TILES
from trainstep.base import files
from trainstep.base.config import load_toml
from trainstep.base.errors import UsageError
from trainstep.base.files import DEEPEST, LARGEST, read_json
from trainstep.bench.allocations import imported_records
from trainstep.bench.profile import records_from_file
from trainstep.bench.sweep.cases import load_grid
from trainstep.checkpointing.policies import Policy
from trainstep.commands.cli import parse
from trainstep.parallel.fsdp.checkpoint import SUMS, _damage
from trainstep.rows.records import read_records
from trainstep.train.checkpoints import NOTE, name_of, open_checkpoint
from trainstep.train.history import METRICS, history
from trainstep.train.loop import RUN, open_folder


def sums(path):
    raise UsageError(_damage(path.parent))


READERS = {
    "config.toml": load_toml,
    "sweep.toml": lambda path: load_grid(path, parse),
    "policy.json": Policy.load,
    "tiles.json": TILES._read,
    RUN: lambda path: open_folder(path.parent, {}, updates=1),
    f"{name_of(1)}/{NOTE}": lambda path: open_checkpoint(path.parents[1], 1),
    SUMS: sums,
    "results.jsonl": read_records,
    METRICS: lambda path: history(path.parent),
    "trace.json": lambda path: list(records_from_file(path)),
    "snapshot.pickle": lambda path: list(imported_records(path)),
}
TEXTS = {
    "nested": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "list": b"[[]]",
    "null": b"null",
    "number": b"9" * 400,
    "not UTF-8": b"\xff\xfe\x00",
}
MADE = {
    **{name: lambda path, text=text: path.write_bytes(text) for name, text in TEXTS.items()},
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_such_file_is_one_line_that_names_it(tmp_path, name, made):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / name_of(1)).mkdir(parents=True)
    MADE[made](path)
    with pytest.raises(UsageError) as error:
        READERS[name](path)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    "text",
    [
        "a." * 100_000 + "a = 1",
        "[" + '"x y". ' * 50_000 + "a]",
        "a = {" + "b." * 50_000 + "b = 1}",
        "a = " + "[" * 5000,
        "[model]\nrope_theta = inf",
        "[model]\nd_model = " + "9" * 400,
        '[model]\nsize = "config.toml"',
        "[model]\nsize = []",
        "[step]\nbatch = 1979-05-27",
    ],
)
def test_a_configuration_that_cannot_be_is_named_at_once(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UsageError, match=r"config\.toml|expected one of tiny"):
        load_toml(tmp_path / "config.toml")


def test_the_limits_are_those_that_are_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert len(read_json(path, list)) == 1
    path.write_text("[" * (DEEPEST + 1) + "1" + "]" * (DEEPEST + 1))
    with pytest.raises(UsageError, match=f"nested more than {DEEPEST} deep"):
        read_json(path, list)
    path.write_text('{"a": {"b": [1, "x"]}}')
    with pytest.raises(UsageError, match=r"x\.json: \[\.\.\.\]\[\.\.\.\]\[1\]: Expected `int`, got `str`"):
        read_json(path, dict[str, dict[str, list[int]]])
    os.truncate(path, 2 * LARGEST["JSON"])
    with pytest.raises(UsageError, match="128 MiB; at most 64"):
        read_json(path, dict)


def test_long_fractions_are_read_as_fast_as_short_ones(monkeypatch):
    """An optimizer's scalars have up to 20 digits behind the point; the slower reader looks at each value."""
    monkeypatch.setattr(files.json, "loads", None)
    assert files.parse_line(b"[0.00032768000000000002, -1.00000000000000000000001e-05]") == [0.00032768, -1e-05]
    with pytest.raises(TypeError):
        files.parse_line(b"[32768000000000000002, 0.5]")
