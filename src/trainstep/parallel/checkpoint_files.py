"""The files of a checkpoint: a checksum for each, and a way to read them that runs nothing in them.

torch.distributed.checkpoint describes its files in `.metadata`, a pickle, and keeps what is no tensor as pickles too; a
pickle can call any function that it names. Here `.metadata` may name what torch itself writes there and nothing else,
and the values are read as `torch.load` reads weights alone.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from trainstep.base.errors import UsageError
from trainstep.base.files import open_regular

METADATA = ".metadata"

_NAMES = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "torch": {"Size"},  # and dtypes
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}
"""Module → the names in it that `.metadata` may ask for."""


def checksums(paths: Iterable[Path]) -> dict[str, str]:
    """File name → SHA-256 of the content, in hexadecimal; several files at once."""
    files = list(paths)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return dict(zip((path.name for path in files), threads.map(_checksum, files), strict=True))


def damaged_file(folder: Path, sums: Mapping[str, str]) -> str | None:
    """Say what is wrong with the first file that is not as it was written; None where all are."""
    for name in sums:
        if not (folder / name).is_file():
            return f"{name} is missing"
    try:
        found = checksums(folder / name for name in sums)
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    wrong = [name for name, value in sums.items() if found[name] != value]
    return f"the content of {wrong[0]} is not what was written (its SHA-256 differs)" if wrong else None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_metadata(folder: Path) -> Metadata:
    """Contents of a checkpoint's `.metadata`.

    Raises:
        UsageError: it asks for a name, or points to a file, that no checkpoint of torch does.
    """
    with open_regular(folder / METADATA) as file:
        found = _MetadataUnpickler(file).load()
    if not isinstance(found, Metadata):
        raise UsageError(f"{METADATA} holds no description of a checkpoint")
    for each in (found.storage_data or {}).values():
        if Path(each.relative_path).name != each.relative_path:
            raise UsageError(f"{METADATA} points to {each.relative_path!r}, outside of its folder")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise UsageError(f"{METADATA} asks for {module}.{name}, which no checkpoint needs; it was not run")


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@dataclass(frozen=True)
class Part:
    """A box of a tensor in a checkpoint, and the memory that it is read into."""

    shape: torch.Size  # of the whole
    offsets: torch.Size  # of the box's first element
    tensor: Tensor

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # torch asks for it by this name
        return [ChunkStorageMetadata(offsets=self.offsets, sizes=self.tensor.shape)] if self.tensor.numel() else []


class _Planner(DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__()
        self._parts = parts

    def set_up_planner(self, *arguments: Any, **named: Any) -> None:
        super().set_up_planner(*arguments, **named)  # which knows tensors alone, and makes None of anything else
        self.state_dict = {**self.state_dict, **self._parts}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        part = self._parts.get(index.fqn)
        return super().lookup_tensor(index) if part is None else part.tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        clean = io.BytesIO()  # torch's planner would unpickle whatever is there: it gets what was read as plain values
        torch.save(torch.load(value, weights_only=True), clean)
        clean.seek(0)
        super().load_bytes(read_item, clean)


def load_files(
    folder: Path, state: dict[str, Any], group: dist.ProcessGroup, parts: Mapping[str, Part] | None = None
) -> None:
    """`torch.distributed.checkpoint.load`, without running what a file might hold. All ranks of the group call it.

    `parts` are boxes of what the files have under these names, besides or instead of what `state` has there.
    """
    load(state, storage_reader=_Reader(str(folder)), planner=_Planner(parts or {}), process_group=group)
