"""Reading a user's own JSON lines: which lines are good, and by reason which are not and where they stand."""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from train.image_files import ImageError, read_image
from train.tasks.left_out import count_reasons
from train.tasks.prepared import Record
from train.tasks.questions import name_question, question_hash

MAX_LINE_BYTES = 2**20
TEST_SHARE = 16  # of a single file, one question in so many belongs to the test split
# Raised whenever the same file would give other records, so that data prepared earlier are never reused.
READER_VERSION = 2


class _BadLine(Exception):
    """Why a line is left out, in a few words."""


@dataclasses.dataclass(eq=False, kw_only=True)
class JsonLines:
    """The good lines of a file as records, and why the others are none; call it to read the file from its beginning.

    Args:
      path: the file, UTF-8.
      split: which split is read; of a single file both are.
      is_shared: whether `path` holds both splits, told apart by the question's hash.
      taken: hashes of questions that belong to another split: lines with them are bad here.
      limit: stop after so many records; None reads all.
      decodes: whether an image has to be one that can be decoded; otherwise it has to be a file.

    Attributes:
      bad: reason -> line numbers, of the last reading.
      lines: lines read, blank ones included.
    """

    path: Path
    split: str
    is_shared: bool = False
    taken: frozenset[int] = frozenset()
    limit: int | None = None
    decodes: bool = True
    bad: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    lines: int = 0

    def __call__(self) -> Iterator[Record]:
        bad: dict[str, list[int]] = collections.defaultdict(list)
        self.bad, self.lines, records = bad, 0, 0
        with open(self.path, "rb") as stream:
            for self.lines, line in _lines(stream):
                if line is not None and not line.strip():
                    continue
                try:
                    record = self._record(line)
                except _BadLine as error:
                    bad[str(error)].append(self.lines)
                    continue
                if self.is_shared and split_of(name_record(record)) != self.split:
                    continue
                records += 1
                yield record
                if records == self.limit:
                    return

    def left_out(self) -> dict[str, Any]:
        """Describe the last reading for JSON: lines, and for each reason the number of lines and the first of them."""
        return count_reasons(self.bad, total=self.lines, unit="line")

    def image_digests(self) -> str:
        """Give one digest of all images that the file names; "" for a file without any. It reads them all."""
        with open(self.path, "rb") as stream:
            if not any(line and b'"image"' in line for _, line in _lines(stream)):
                return ""
        content = hashlib.sha256()
        for record in dataclasses.replace(self, decodes=False)():
            content.update(record["image_sha256"].encode())
        return content.hexdigest()

    def _record(self, line: bytes | None) -> Record:
        if line is None:
            raise _BadLine(f"longer than {MAX_LINE_BYTES:,} bytes")
        row = _parse(line)
        kinds = [kind for kind in ("prompt", "question") if kind in row]
        if len(kinds) != 1:
            raise _BadLine("both prompt and question" if kinds else "no prompt or question")
        question = row[kinds[0]]
        if not isinstance(question, str) or isinstance(question, _Literal) or not question.strip():
            raise _BadLine(f"{kinds[0]} is no text, or empty")
        if "answer" not in row:
            raise _BadLine("no answer")
        answer = row["answer"]
        if not isinstance(answer, str) or not answer.strip():
            raise _BadLine("answer is neither text nor number, or empty")
        record = {
            "kind": kinds[0],
            "question": question,
            "answer": str(answer),
            "image": row.get("image") or "",
            "image_sha256": self._image_digest(row.get("image")),
            "line": str(self.lines),
        }
        if question_hash(name_record(record)) in self.taken:
            raise _BadLine("question of the test split")
        return record

    def _image_digest(self, image: object) -> str:
        if image is None:
            return ""
        if not isinstance(image, str) or isinstance(image, _Literal) or not image:
            raise _BadLine("image is no path")
        try:
            content = (self.path.parent / image).read_bytes()
            if self.decodes:
                read_image(content)
        except ImageError as error:
            raise _BadLine(error.reason) from error
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise _BadLine("image file is missing or not readable") from error
        return hashlib.sha256(content).hexdigest()


def name_record(record: Record) -> str:
    """Give the question of a record and what its image is."""
    return name_question(record["question"], record["image_sha256"])


def split_of(question: str) -> str:
    """Say to which split of a single file a question (see `name_question`) belongs: one in sixteen is for the test.

    Example:
      >>> {split_of(f"{number} + 1") for number in range(100)} == {"train", "test"}
      True
    """
    return "test" if question_hash(question) % TEST_SHARE == 0 else "train"


class _Literal(str):
    """The digits of a JSON number, told apart from a text."""


def _parse(line: bytes) -> dict:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BadLine("not UTF-8") from error
    try:
        row = json.loads(text, parse_int=_Literal, parse_float=_Literal, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise _BadLine("not JSON") from error
    if not isinstance(row, dict):
        raise _BadLine("not an object")
    try:
        "".join(value for value in row.values() if isinstance(value, str)).encode("utf-8")
    except UnicodeEncodeError as error:  # "\ud800" is JSON and no text
        raise _BadLine("half a surrogate pair") from error
    return row


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) pairs, without a byte order mark; None for a line that is too long to be kept in memory."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_long = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
        while is_long and line and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
        yield number, None if is_long else line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
