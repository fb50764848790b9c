import numpy as np
import pytest
import torch

from trainstep.base.errors import UsageError
from trainstep.step.model.text import load_tokens, token_batches


def batches(tokens, **changes):
    options = {"batch": 2, "context": 8, "vocab_size": 256, "seed": 0}
    return token_batches(np.asarray(tokens), **(options | changes))


def test_default_text_is_real_python_source():
    tokens = load_tokens(None, 256)
    assert len(tokens) > 1_000_000
    assert b"import " in tokens[:100_000].tobytes()


def test_a_file_is_its_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("naïve ☃", encoding="utf-8")
    assert load_tokens(path, 10_000).tobytes() == "naïve ☃".encode()


def test_as_much_text_as_is_asked_for(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    assert load_tokens(tmp_path / "a.txt", 256, max_text_bytes=4).tobytes() == b"aaaa"
    assert load_tokens(tmp_path, 256, max_text_bytes=14).tobytes() == b"a" * 10 + b"bbbb"
    assert len(load_tokens(tmp_path, 256)) == 30


def test_a_folder_is_its_text_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first ")
    (tmp_path / "sub" / "c.txt").write_text(" third")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe\x00")
    assert load_tokens(tmp_path, 256).tobytes() == b"first second third"


@pytest.mark.parametrize(("vocab", "dtype"), [(50_257, np.uint16), (151_936, np.uint32)])
def test_token_files_are_mapped(tmp_path, vocab, dtype):
    ids = np.arange(1000, dtype=dtype) * 50
    ids.tofile(tmp_path / "tokens.bin")
    tokens = load_tokens(tmp_path / "tokens.bin", vocab)
    assert isinstance(tokens, np.memmap)
    assert np.array_equal(tokens, ids)


def test_targets_are_inputs_one_later():
    inputs, targets = next(batches(np.arange(200, dtype=np.uint8)))
    assert inputs.shape == targets.shape == (2, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, inputs + 1)


def test_the_seed_decides_the_batches():
    tokens = np.random.default_rng(0).integers(0, 256, 5000)
    first, again, other = (next(batches(tokens, seed=seed))[0] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_place_can_be_cut_including_the_last():
    seen = {int(row[0]) for _, (inputs, _) in zip(range(200), batches(np.arange(12)), strict=False) for row in inputs}
    assert seen == {0, 1, 2, 3}  # 12 tokens hold 4 windows of 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent.txt", "no data at"),
        (lambda folder: folder, "no text in"),
        (lambda folder: _file(folder / "empty.txt", b""), "no text in"),
        (lambda folder: _file(folder / "binary.txt", b"\xff\xfe\x00"), "not UTF-8"),
        (lambda folder: _file(folder / "odd.bin", b"\x01\x02\x03"), "multiple of 2"),
        (lambda folder: _file(folder / "empty.bin", b""), "multiple of 2"),
    ],
)
def test_bad_data_says_so(tmp_path, make, message):
    with pytest.raises(UsageError, match=message):
        load_tokens(make(tmp_path), 256)


def test_text_needs_a_vocabulary_of_bytes():
    with pytest.raises(UsageError, match="vocab_size >= 256"):
        load_tokens(None, 100)


def test_data_smaller_than_a_sequence():
    with pytest.raises(UsageError, match=r"8 tokens, but one sequence needs context \+ 1 = 9"):
        batches(np.arange(8))


def test_ids_beyond_the_vocabulary():
    with pytest.raises(UsageError, match="token id 300, beyond the vocabulary of 256"):
        next(batches(np.full(20, 300)))


def _file(path, content):
    path.write_bytes(content)
    return path
