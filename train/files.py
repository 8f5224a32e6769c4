"""Durable writes: a kill or a power cut leaves the old file or the new one, never a part."""

import os
from pathlib import Path


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` in UTF-8: to a temporary neighbour first, flushed to the disk, then renamed over it.

    Raises:
        OSError: no space or no permission; the old file is then untouched.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder's entries: without it a renamed or new file may be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
