"""The records of a run as it goes: JSON lines that survive a kill and a resume, and TensorBoard events."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.exits import DataError, UsageError
from train.files import replace_file

METRICS, EVALS, PREDICTIONS = "metrics.jsonl", "eval.jsonl", "predictions"


def encode_row(row: Mapping[str, Any]) -> str:
    """Return a row as one line of strict JSON.

    JSON has no NaN and no infinity: such a value becomes null and is named under `nonfinite`, so that it differs from
    a value that was never there.

    Example:
        >>> encode_row({"step": 3, "loss": float("inf")})
        '{"step": 3, "loss": null, "nonfinite": {"loss": "inf"}}'
    """
    row = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
    nonfinite = {name: str(v) for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(row, allow_nan=False)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a file; [] where it does not exist. A last line that a kill cut off is left out.

    Raises:
        DataError: another line is not a JSON object; the message gives its number.
    """
    if not os.path.exists(path):
        return []
    lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
        except ValueError as error:  # also UnicodeDecodeError
            if number == len(lines):
                break
            raise DataError(f"{path}, line {number} is not a row ({error}): mend it or move the file away.") from error
        rows.append(row)
    return rows


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole file of rows at once: it has all of them or does not change. Makes its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(encode_row(row) + "\n" for row in rows))


class JsonlWriter:
    """Append rows to a file so that each appears once, also over kills and resumes.

    Args:
        path: the file.
        resume_step: the step the run goes on from: rows of later steps are dropped, they will come again. None starts
            the file anew.
        key: the fields that tell rows apart.

    Raises:
        DataError: the file holds a line that is no row.

    Example:
        >>> import tempfile
        >>> with JsonlWriter(tempfile.mkdtemp() + "/metrics.jsonl") as writer:
        ...     writer.write({"step": 1, "loss": 2.5})
        ...     read_jsonl(writer.path)
        [{'step': 1, 'loss': 2.5}]
    """

    def __init__(
        self, path: str | os.PathLike[str], *, resume_step: int | None = None, key: Sequence[str] = ("step",)
    ):
        self.path = Path(path)
        self._key = tuple(key)
        rows = [] if resume_step is None else [row for row in read_jsonl(path) if self._step_of(row) <= resume_step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() or self.path.read_bytes() != text.encode():
            replace_file(self.path, text)
        self._written = {self._key_of(row) for row in rows}
        self._file = self.path.open("a", encoding="utf-8")

    def _step_of(self, row: Mapping[str, Any]) -> int:
        if not isinstance(row.get("step"), int):
            raise DataError(f"{self.path} holds a row without a step ({encode_row(row)[:80]}): move the file away.")
        return row["step"]

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self._key)

    def has(self, **key: Any) -> bool:
        """Return whether there is a row with this key: what a resumed run need not do again."""
        return self._key_of(key) in self._written

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row and hand it to the system, so that a kill of this process cannot lose it.

        Raises:
            ValueError: there is a row with this key.
        """
        key = self._key_of(row)
        if key in self._written:
            raise ValueError(f"{self.path.name} has a row with {dict(zip(self._key, key, strict=True))} already.")
        self._file.write(encode_row(row) + "\n")
        self._file.flush()
        self._written.add(key)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def drop_later_predictions(folder: str | os.PathLike[str], resume_step: int | None) -> None:
    """Remove `predictions/<step>.jsonl` of steps after the one a run goes on from (all of them for a new run)."""
    for path in (Path(folder) / PREDICTIONS).glob("*.jsonl"):
        if resume_step is None or (path.stem.isdecimal() and int(path.stem) > resume_step):
            path.unlink()


class TensorBoardWriter:
    """Write the numbers of rows as TensorBoard scalars.

    Args:
        folder: where the event files go.
        resume_step: events of later steps, written before a kill, are hidden.

    Raises:
        UsageError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UsageError("--tensorboard needs tensorboardX: pip install tensorboardX, or leave it out.") from error
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, row: Mapping[str, Any], *, prefix: str) -> None:
        """Write every number of the row as `prefix/name` at the row's step."""
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
                self._writer.add_scalar(f"{prefix}/{name}", value, row["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
