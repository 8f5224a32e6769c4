"""The manifest of one checkpoint: a SHA-256 of every file, written last, checked before anything is restored.

Orbax finds a checkpoint by its folder's name and reads a flipped bit without an error: this file is what makes a step
count.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.files import replace_file, sync_folder

MANIFEST = "manifest.json"
_FORMAT = 1


class DamageError(Exception):
    """A step folder is not what its manifest says, or has none; the message is the reason."""


def write_manifest(folder: str | os.PathLike[str], *, step: int, leaves: Mapping[str, Any]) -> None:
    """Flush every file of a finished step to the disk, hash it, and write the manifest last.

    Args:
        folder: the step's folder.
        step: its step, so that a renamed folder is noticed.
        leaves: path -> [shape, dtype] of the saved state.

    Raises:
        OSError: no space, no permission.
    """
    folder = Path(folder)
    files = {name: [os.path.getsize(folder / name), _sha256(folder / name, flush=True)] for name in _files(folder)}
    for parent in {str(Path(name).parent) for name in files}:
        sync_folder(folder / parent)
    content = {"format": _FORMAT, "step": step, "leaves": dict(leaves), "files": files}
    replace_file(folder / MANIFEST, json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n")
    sync_folder(folder.parent)


def read_manifest(folder: str | os.PathLike[str], *, step: int) -> dict[str, Any]:
    """Return the manifest of a step after checking it against itself and the step, not against the files.

    Raises:
        DamageError: the folder is a link or no folder, or the manifest is missing, damaged or of another step.
    """
    folder = Path(folder)
    if not os.path.lexists(folder):
        raise DamageError("it does not exist")
    if folder.is_symlink() or not folder.is_dir():
        raise DamageError("it is a link or a file, not a folder of this run")
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise DamageError("it has no manifest: the save did not finish, or another program made it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        digest = content.pop("sha256")
        if digest != _digest(content) or content["format"] != _FORMAT:
            raise DamageError("its manifest is damaged")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamageError("its manifest is damaged") from error
    if content["step"] != step:
        raise DamageError(f"its manifest is of step {content['step']}: the folder was renamed")
    return content


def verify(folder: str | os.PathLike[str], *, step: int) -> dict[str, Any]:
    """Return the manifest of a step after comparing every file with it.

    Raises:
        DamageError: a file is missing, extra, a link, or differs in size or content.
    """
    folder = Path(folder)
    content = read_manifest(folder, step=step)
    found, listed = set(_files(folder)), set(content["files"])
    if found != listed:
        missing, extra = sorted(listed - found), sorted(found - listed)
        raise DamageError(f"files are missing: {missing[0]}" if missing else f"an unknown file lies in it: {extra[0]}")
    for name, (size, digest) in content["files"].items():
        if os.path.getsize(folder / name) != size:
            raise DamageError(f"{name} has {os.path.getsize(folder / name)} bytes instead of {size}")
        if _sha256(folder / name) != digest:
            raise DamageError(f"{name} differs from what was saved")
    return content


def _files(folder: Path) -> list[str]:
    """List all files below a folder but the manifest, as relative paths with `/`."""
    names = []
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            if path.is_symlink():
                raise DamageError(f"{path.relative_to(folder).as_posix()} is a link")
            if name in files:
                names.append(path.relative_to(folder).as_posix())
    return sorted(name for name in names if name != MANIFEST)


def _sha256(path: Path, *, flush: bool = False) -> str:
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
