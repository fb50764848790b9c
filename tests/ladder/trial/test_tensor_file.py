"""Tensors in a file that is mapped: what was written is what is read, and what is not whole is told."""

import math

import pytest
import torch

from trainstep.ladder.trial import capture
from trainstep.ladder.trial.capture import TensorFile, read

SHAPES = {"matrix": (300, 40), "one": (), "none": (0, 3), "vector": (5,)}


def drawn(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(path, groups, facts):
    """Each group of tensors, in the order in which they are given."""
    file = TensorFile(path)
    for group, values in groups:
        for name, place in file.add(group, {name: each.shape for name, each in values.items()}).items():
            assert not place.any()
            place.copy_(values[name])
    file.finish(facts)


def test_what_was_written_is_read(tmp_path):
    first, second, empty = drawn(SHAPES), drawn({"large": (2000, 70)}, 1), drawn({"none": (0,)})
    write(tmp_path / "file", [("a", first), ("b", second), ("c", empty)], {"loss": math.nan, "sizes": {"x": 0.1}})
    groups, facts = read(tmp_path / "file")
    (tmp_path / "file").unlink()
    assert {group: list(each) for group, each in groups.items()} == {"a": list(SHAPES), "b": ["large"], "c": ["none"]}
    for own, expected in ((groups["a"], first), (groups["b"], second), (groups["c"], empty)):
        assert all(own[name].shape == each.shape and torch.equal(own[name], each) for name, each in expected.items())
    assert math.isnan(facts["loss"])
    assert facts["sizes"] == {"x": 0.1}


def test_a_group_is_added_to_and_the_last_of_equal_names_counts(tmp_path):
    first, second = drawn({"x": (3,), "y": (4,)}), drawn({"y": (2, 2)}, 1)
    write(tmp_path / "file", [("a", first), ("a", second)], {})
    (found,) = read(tmp_path / "file")[0].values()
    assert torch.equal(found["x"], first["x"])
    assert torch.equal(found["y"], second["y"])


def test_numbers_of_other_types_are_read_as_they_were(tmp_path):
    values = {
        "count": torch.tensor(2**40 + 1),
        "is": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "double": torch.randn(7, dtype=torch.float64),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "no one": torch.zeros(0, 4, dtype=torch.int8),
    }
    file = TensorFile(tmp_path / "file")
    file.add("a", {"odd": (3,)}, torch.uint8)
    for name, value in values.items():
        file.add("a", {name: value.shape}, value.dtype)[name].copy_(value)
    file.finish({})
    found = read(tmp_path / "file")[0]["a"]
    for name, value in values.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value)


def test_what_is_written_later_is_there_too(tmp_path):
    file = TensorFile(tmp_path / "file")
    (place,) = file.add("a", {"x": (3,)}).values()
    file.add("b", {"x": (3,)})
    place.fill_(2.0)
    file.finish({})
    assert read(tmp_path / "file")[0]["a"]["x"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("length", [0, 10, 5000])
def test_a_file_without_its_end_is_told(tmp_path, length):
    TensorFile(tmp_path / "file").add("a", {"x": (length // 4,)})
    with pytest.raises(ValueError, match="file has no end"):
        read(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(capture.os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        TensorFile(tmp_path / "file").add("a", {"x": (3,)})


def test_a_system_that_reserves_no_room_has_the_file_too(tmp_path, monkeypatch):
    monkeypatch.delattr(capture.os, "posix_fallocate")
    values = drawn(SHAPES)
    write(tmp_path / "file", [("a", values), ("b", values)], {})
    for found in read(tmp_path / "file")[0].values():
        assert torch.equal(found["matrix"], values["matrix"])
