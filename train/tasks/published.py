"""Published files of a data set: found in a folder of the user's, or downloaded once and checked."""

import dataclasses
import hashlib
import os
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from train.exits import DataError
from train.tasks.prepared import default_data_dir

_CHUNK = 2**20
_TIMEOUT_SECONDS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """One file as its authors publish it.

    Args:
      folder: name of the data set's folder below `data_dir`.
      name: file name in it.
      url: where it is downloaded from.
      sha256: of the file at `url`; a download that differs is refused.
    """

    folder: str
    name: str
    url: str
    sha256: str


def locate(file: PublishedFile, *, data_dir: str | None = None) -> Path:
    """Find a published file, or download it.

    Looked for as ``data_dir/folder/name``, ``data_dir/name``, then the same below `default_data_dir()`, where a
    download goes too. A file that is found is taken as it is: its digest is part of what is prepared from it.

    Args:
      file: what to find.
      data_dir: a folder of the user's; nothing is written there. None is `default_data_dir()`.

    Raises:
      DataError: it is nowhere and cannot be downloaded, or the download is another file; it says where to put it.
    """
    cache = Path(default_data_dir())
    wanted = Path(data_dir) if data_dir else cache
    places = [wanted / file.folder / file.name, wanted / file.name, cache / file.folder / file.name]
    found = next((place for place in places if place.is_file()), None)
    return found or _download(file, places[-1], wanted=places[0])


def digest(path: Path) -> str:
    """Give the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_or_none(path: Path) -> str:
    """Give the SHA-256 of a file, or "" where there is none that can be read."""
    try:
        return digest(path)
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return ""


def _download(file: PublishedFile, path: Path, *, wanted: Path) -> Path:
    instead = f"Get {file.name} from {file.url} yourself and put it at {wanted}, or give its folder as --data_dir."
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that nobody meets half a file.
    aside = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with urllib.request.urlopen(file.url, timeout=_TIMEOUT_SECONDS) as answer, open(aside, "wb") as stream:
            while chunk := answer.read(_CHUNK):
                stream.write(chunk)
        found = digest(aside)
        if found != file.sha256:
            raise DataError(
                f"{file.url} is not the file known here: its SHA-256 is {found}, wanted {file.sha256}. {instead}"
            )
        os.replace(aside, path)
    except urllib.error.URLError as error:
        raise DataError(f"{file.name} is not at {wanted} and cannot be downloaded: {error}. {instead}") from error
    finally:
        aside.unlink(missing_ok=True)
    return path
