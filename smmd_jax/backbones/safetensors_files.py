"""The safetensors files of a checkpoint folder: one file, or shards and their index."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from smmd_jax.errors import CheckpointError
from smmd_jax.json_files import read_object

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: its file's name in the folder, its shape, and its NumPy dtype."""

    file: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of a folder by name, and how they are read; nothing stays open or in memory.

    Attributes:
        folder: of the checkpoint.
        tensors: name -> Tensor, in the order of the files.
    """

    folder: Path
    tensors: Mapping[str, Tensor]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor.file for tensor in self.tensors.values()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a block of a tensor; only the pages of the block are read, and the file is closed again."""
        with safe_open(self.folder / self.tensors[name].file, framework="numpy") as file:
            block = file.get_slice(name)
            return block[index] if self.tensors[name].shape else file.get_tensor(name)


def open_folder(folder: str | Path) -> TensorFiles:
    """Read the headers of a checkpoint's safetensors files.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the shards that it names.

    Raises:
        CheckpointError: no such files, a broken one, an index that names a file outside the folder or disagrees with
            the shards, or tensors that are not plain floating point numbers.
    """
    folder = Path(folder)
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if index.is_file():
        weight_map = _read_index(index)
        files = list(dict.fromkeys(weight_map.values()))
    elif single.is_file():
        weight_map, files = None, [SINGLE_NAME]
    else:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        hint = f"; pickles ({', '.join(pickles)}) are never read: convert them to safetensors" if pickles else ""
        raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")
    tensors: dict[str, Tensor] = {}
    faults = []
    for file in files:
        for name, tensor in _read_header(folder, file).items():
            if name in tensors:
                faults.append(f"{name} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    if weight_map is not None:
        for name, file in weight_map.items():
            found = tensors.get(name)
            if found is None or found.file != file:
                faults.append(f"{name} should be in {file}, " + (f"is in {found.file}" if found else "is nowhere"))
        faults += [f"{name} is in {tensors[name].file}, not in the index" for name in tensors if name not in weight_map]
    if faults:
        raise CheckpointError(f"{index} and the shards disagree:\n  " + "\n  ".join(faults))
    return TensorFiles(folder, tensors)


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = read_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not an index of shards: {error}") from error
    weight_map = content.get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and {type(file) for file in weight_map.values()} == {str}):
        raise CheckpointError(f"{path} is not an index of shards: weight_map must name a file for every tensor")
    if not isinstance(content.get("metadata", {}), dict):
        raise CheckpointError(f"{path} is not an index of shards: metadata is no object")
    for file in weight_map.values():
        # A name such as ../../secret or /etc/passwd would read outside the folder.
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {file!r}, wanted the plain name of a .safetensors file in its folder")
    return weight_map


def _read_header(folder: Path, file: str) -> dict[str, Tensor]:
    path = folder / file
    if not os.path.isfile(path):  # unlike Path.is_file it takes a name that no file can have
        raise CheckpointError(f"{path} does not exist, and the index names it: the download is not complete")
    tensors, odd = {}, {}
    try:
        with safe_open(path, framework="numpy") as opened:
            for name in opened.offset_keys():
                block = opened.get_slice(name)
                kind = block.get_dtype()
                if kind in _PLAIN_TYPES:
                    tensors[name] = Tensor(file, tuple(block.get_shape()), np.dtype(_PLAIN_TYPES[kind]))
                else:
                    odd[name] = kind
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    if odd:
        name, kind = next(iter(odd.items()))
        raise CheckpointError(
            f"{path} holds {len(odd)} tensors that are not plain floating point numbers (for example {name}: {kind}), "
            "and training needs plain ones: take the BF16 repository of the model"
        )
    return tensors


def plan_files(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], *, max_bytes: int = _MAX_SHARD_BYTES
) -> dict[str, str]:
    """Return tensor name -> file name: one file, or shards of at most `max_bytes` (one tensor may exceed it)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in tensors.items():
        length = math.prod(shape) * np.dtype(dtype).itemsize
        if shards[-1] and size + length > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += length
    if len(shards) == 1:
        return dict.fromkeys(shards[0], SINGLE_NAME)
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    return {name: file for file, shard in zip(names, shards, strict=True) for name in shard}


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file, readable by every framework.

    Raises:
        OSError: no space or no permission.
    """
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports the system's errors
        raise OSError(f"{path.name} cannot be written: {error}") from error
    path.chmod(0o644)  # the library makes it private


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int, *, extra: Mapping[str, Any] = {}) -> None:
    """Write the index of a folder of shards; `extra` joins its metadata."""
    content = {"metadata": {**extra, "total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def by_file(weight_map: Mapping[str, str]) -> Iterable[tuple[str, Sequence[str]]]:
    """Return (file, its tensors) in the order of the map."""
    groups: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        groups.setdefault(file, []).append(name)
    return groups.items()
