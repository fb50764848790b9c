"""Text and token files → batches of token ids.

Text is tokenised by bytes (ids 0–255), so any UTF-8 file will do and nothing needs downloading. By default the text is
the source of Python's own standard library, which every machine with Python has. Files ending in `.bin` hold token ids
already: uint16 where the vocabulary fits 65,536, else uint32, as in nanoGPT's data files; they are memory-mapped.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainstep.base.errors import UsageError

Tokens = npt.NDArray[np.integer]
MAX_TEXT_BYTES = 32 * 2**20  # text beyond this is not read for a benchmark: it needs real text, not all of it


def load_tokens(data: Path | None, vocab_size: int, *, max_text_bytes: int | None = None) -> Tokens:
    """Token ids (n,) of a text file, a folder of text files, a `.bin` file, or the standard library's source (None).

    Of text, no more than `max_text_bytes` are read.

    Raises:
        UsageError: nothing there, nothing in it, not UTF-8, a broken `.bin`, or a vocabulary too small for bytes.
    """
    if data is not None and not data.exists():
        raise UsageError(f"no data at {data}; give a UTF-8 text file, a folder of them, or a .bin file of token ids")
    if data is not None and data.suffix == ".bin":
        return _map_token_file(data, vocab_size)
    if vocab_size < 256:
        raise UsageError(f"text is tokenised by bytes, which needs vocab_size >= 256, not {vocab_size}")
    return np.frombuffer(_read_text(data, max_text_bytes), dtype=np.uint8)


def _map_token_file(path: Path, vocab_size: int) -> Tokens:
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise UsageError(
            f"{path} has {size} bytes, not a positive multiple of {dtype.itemsize}; "
            f"a vocabulary of {vocab_size} is read as {dtype.name} token ids"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _read_text(data: Path | None, limit: int | None) -> bytes:
    origin = Path(sysconfig.get_paths()["stdlib"]) if data is None else data
    found = [origin] if origin.is_file() else origin.glob("*.py") if data is None else origin.rglob("*")
    text = bytearray()
    for file in sorted(filter(Path.is_file, found)):
        if limit is not None and len(text) >= limit:
            break
        content = _read_some(file, None if limit is None else limit - len(text))
        if _is_utf8(content):
            text += content
        elif file == data:  # a folder may hold images beside its text
            raise UsageError(f"{data} is not UTF-8 text; give text, or a .bin file of token ids")
    if not text:
        raise UsageError(f"no text in {origin}; give a UTF-8 text file, a folder of them, or a .bin file of token ids")
    return bytes(text)


def _read_some(path: Path, limit: int | None) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"  # the read limit cut the last character
    return b"\0" not in content


def token_batches(
    tokens: Tokens, *, batch: int, context: int, vocab_size: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (inputs, targets), each (batch, context) int64, cut at random places; targets are one later.

    The same tokens and seed give the same batches.

    Raises:
        UsageError: fewer tokens than one sequence and its next token, or an id outside the vocabulary.
    """
    if len(tokens) < context + 1:
        raise UsageError(
            f"the data has {len(tokens)} tokens, but one sequence needs context + 1 = {context + 1}; "
            "give more data or a shorter --context"
        )
    random = np.random.default_rng(seed)
    places = (random.integers(0, len(tokens) - context, size=batch) for _ in itertools.count())
    return (cut_sequences(tokens, starts, context, vocab_size) for starts in places)


def cut_sequences(
    tokens: Tokens, starts: npt.NDArray[np.integer], context: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The sequences at `starts` (B,) as (inputs, targets), each (B, context) int64; targets are one later.

    Raises:
        UsageError: an id outside the vocabulary.
    """
    window = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)  # (B, S + 1)
    if (largest := int(window.max())) >= vocab_size:
        raise UsageError(f"the data holds token id {largest}, beyond the vocabulary of {vocab_size}")
    ids = torch.from_numpy(window)
    return ids[:, :-1], ids[:, 1:]
