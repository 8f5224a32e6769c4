"""JSON files that others wrote: read strictly, whatever they hold."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        OSError: the file is not there or cannot be read.
        ValueError: not a regular file, not JSON in UTF-8, nested too deeply, not an object, or a name that stands twice
            in one object: readers differ in which of the two they take.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")  # reading a pipe would wait for ever
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, wanted an object")
    return content


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it gives {repeated!r} twice in one object")
    return content
