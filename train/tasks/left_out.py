"""What a reader of the user's own files leaves out: counted by reason, said in one sentence, refused above a number."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from train.exits import DataError
from train.tasks.prepared import Record, RecordBuilder

_SHOWN = 5


class CountingReader(Protocol):
    """Reads the records of a split as often as it is called, and knows what the last reading left out of `path`."""

    path: Path

    def __call__(self) -> Iterator[Record]: ...

    def left_out(self) -> dict[str, Any]: ...


class CountingBuilder(RecordBuilder):
    """Records of a `CountingReader`; what was left out is kept beside them, so that a later start tells the same."""

    def _generate_examples(self, split: str, make: CountingReader) -> Iterator[tuple[int, Record]]:
        try:
            yield from super()._generate_examples(split, make)
        except DataError as error:
            left_out = make.left_out()
            note = describe(make.path, left_out)
            raise DataError(f"{make.path} has no good {left_out['unit']} for split {split}. {note}") from error
        self.info.metadata[f"{split}_left_out"] = make.left_out()


def count_reasons(bad: Mapping[str, list], *, total: int, unit: str) -> dict[str, Any]:
    """Describe a reading for JSON: what was read, and for each reason how many were left out and the first of them.

    Args:
      bad: reason -> the places (line numbers, file names) of what was left out.
      total: how many were read.
      unit: what one of them is called.

    Example:
      >>> count_reasons({"no answer": [3, 5]}, total=9, unit="line")["reasons"]
      {'no answer': {'count': 2, 'first': [3, 5]}}
    """
    reasons = {reason: {"count": len(places), "first": places[:_SHOWN]} for reason, places in bad.items()}
    return {"total": total, "unit": unit, "reasons": reasons}


def describe(path: Path, left_out: Mapping[str, Any]) -> str:
    """Say what was left out of a file or folder and why.

    Example:
      >>> describe(Path("a/train.jsonl"), count_reasons({"no answer": [3, 5]}, total=9, unit="line"))
      'train.jsonl: 2 of 9 lines are left out: no answer (2: lines 3, 5).'
    """
    unit, parts = left_out["unit"], []
    for reason, found in sorted(left_out["reasons"].items(), key=lambda item: -item[1]["count"]):
        shown = ", ".join(map(str, found["first"])) + (", ..." if found["count"] > len(found["first"]) else "")
        parts.append(f"{reason} ({found['count']:,}: {unit}{'s' if found['count'] > 1 else ''} {shown})")
    return f"{path.name}: {count_of(left_out):,} of {left_out['total']:,} {unit}s are left out" + (
        f": {'; '.join(parts)}." if parts else "."
    )


def notes_on(path: Path, left_out: Mapping[str, Any]) -> list[str]:
    """Give what the header of a run says of it: nothing where nothing was left out."""
    return [describe(path, left_out)] if left_out["reasons"] else []


def count_of(left_out: Mapping[str, Any]) -> int:
    """Give the number of all that was left out."""
    return sum(found["count"] for found in left_out["reasons"].values())


def refuse_beyond(path: Path, left_out: Mapping[str, Any], most: int) -> None:
    """Refuse a file or folder of which more is left out than may be.

    Raises:
      DataError: with every reason.
    """
    if count_of(left_out) > most:
        raise DataError(f"{describe(path, left_out)} At most {most:,} may be bad: mend them.")
