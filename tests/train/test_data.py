"""Which sequences make which update: the same whatever the number of ranks."""

import numpy as np
import pytest
import torch

from tests.train.runs import TEXT, config
from trainstep.base.errors import UsageError
from trainstep.train.data import open_data


def sequences(parts):
    return [tuple(row.tolist()) for inputs, _ in parts for row in inputs]


@pytest.mark.parametrize("step", [1, 7])
def test_the_ranks_slices_are_the_global_batch_at_every_world_size(step):
    data = open_data(TEXT, config())
    whole = sequences(data.training_parts(step, 0, 1, 8))
    assert len(whole) == 8
    for world_size, batch in ((1, 2), (2, 1), (2, 4), (4, 2), (8, 1)):
        parts = [data.training_parts(step, rank, world_size, batch) for rank in range(world_size)]
        assert [row for part in parts for row in sequences(part)] == whole
        assert {inputs.shape for part in parts for inputs, _ in part} == {(batch, 32)}


def test_the_order_follows_from_seed_and_step_alone():
    data, again = open_data(TEXT, config()), open_data(TEXT, config())
    other = open_data(TEXT, config(step={"seed": 1}))
    assert sequences(again.training_parts(9, 0, 1, 8)) == sequences(data.training_parts(9, 0, 1, 8))
    assert sequences(data.training_parts(10, 0, 1, 8)) != sequences(data.training_parts(9, 0, 1, 8))
    assert sequences(other.training_parts(9, 0, 1, 8)) != sequences(data.training_parts(9, 0, 1, 8))


def test_no_update_sees_the_batch_of_another():
    """Every one of 40 updates draws anew: with 8 of about a million starts each, none comes twice."""
    data = open_data(None, config())
    batches = [tuple(sequences(data.training_parts(step, 0, 1, 8))) for step in range(40)]
    assert len(set(batches)) == 40


def test_targets_are_one_later_and_validation_is_kept_apart():
    data = open_data(TEXT, config())
    text = TEXT.read_bytes()
    kept = len(data.validation)
    assert kept == int(len(text) * 0.1)
    assert bytes(data.training) + bytes(data.validation) == text
    for parts, part in (
        (data.training_parts(3, 0, 1, 8), text[:-kept]),
        (data.validation_parts(0, 1, 8), text[-kept:]),
    ):
        for inputs, targets in parts:
            assert torch.equal(inputs[:, 1:], targets[:, :-1])
            for row, last in zip(inputs, targets[:, -1], strict=True):
                assert bytes([*row.tolist(), int(last)]) in part


def test_validation_is_the_same_at_every_world_size():
    data = open_data(TEXT, config(eval_batches=2))
    whole = sequences(data.validation_parts(0, 1, 2))
    assert len(whole) == 16
    assert [row for rank in range(4) for row in sequences(data.validation_parts(rank, 4, 2))] == whole


def tokens_file(folder, ids):
    path = folder / "tokens.bin"
    np.asarray(ids, dtype=np.uint16).tofile(path)
    return path


def test_ids_beyond_the_vocabulary_are_found_by_the_rank_that_has_them(tmp_path):
    ids = np.arange(4000) % 256
    ids[3900] = 999  # in the validation part
    data = open_data(tokens_file(tmp_path, ids), config())
    data.check_ids(0, 2)
    with pytest.raises(UsageError, match="token id 999, beyond the vocabulary of 256"):
        data.check_ids(1, 2)


def test_the_description_sees_another_token_anywhere(tmp_path):
    ids = np.arange(4000) % 256
    plain = open_data(tokens_file(tmp_path, ids), config()).describe()
    ids[1234] += 1
    changed = open_data(tokens_file(tmp_path, ids), config()).describe()
    assert plain["tokens"] == changed["tokens"] == 4000
    assert plain["sha256"] != changed["sha256"]


def test_too_little_data(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 200)
    with pytest.raises(UsageError, match="of 200 tokens 20 are for validation, but one sequence needs"):
        open_data(path, config())
