"""ChartQA as its authors publish it, in a folder: which questions are read, and what is left out of them and why."""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from train.exits import DataError
from train.image_files import ImageError, read_image
from train.number_text import parse_float
from train.tasks.base import Example
from train.tasks.left_out import CountingBuilder, count_reasons, notes_on, refuse_beyond
from train.tasks.prepared import Record, RecordConfig, RecordSource, prepare_builder
from train.tasks.published import digest_or_none
from train.tasks.questions import name_question, question_hash

# Raised whenever the same folder would give other records, so that data prepared earlier are never reused.
CHARTQA_FILES_VERSION = 1
SPLITS = ("train", "val", "test")
SOURCES = ("human", "augmented")
# A split's questions must not occur in those of the splits behind it: what is measured on is never learnt from.
_BEHIND = {"train": ("val", "test"), "val": ("test",), "test": ()}


class ChartQAQuestions(CountingBuilder):
    """Questions about published charts (Masry, Long, Tan, Joty, Hoque, 2022); the pictures stay where they are."""

    FIELDS = ("key", "imgname", "sha256", "query", "label", "source", "table")


@dataclasses.dataclass(eq=False, kw_only=True)
class QuestionReader:
    """The good questions of a split as records, and why the others are none.

    Args:
      path: the user's folder.
      place: the folder of the split, with ``png`` and ``tables``.
      rows: (source, number of the row in its file, row) of every question.
      is_meant: whether a label is one of those asked for; other questions are passed over.
      taken: hashes of questions about charts that belong to another split.
      decodes: whether a picture has to be one that can be decoded; otherwise it has to be a file.

    Attributes:
      bad: reason -> file and number of the questions, of the last reading.
    """

    path: Path
    place: Path
    rows: Sequence[tuple[str, int, Any]]
    is_meant: Callable[[str], bool] = lambda label: True
    taken: frozenset[int] = frozenset()
    decodes: bool = True
    bad: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    _faults: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Iterator[Record]:
        self.bad = collections.defaultdict(list)
        asked: collections.Counter[str] = collections.Counter()
        for source, number, row in self.rows:
            reason, name, query, label = _parts(row)
            found = ""
            if not reason:
                reason, found = self._picture(name)
            if not reason and question_hash(name_question(query, found)) in self.taken:
                reason = "question of another split"
            if reason:
                self.bad[reason].append(f"{source} {number}")
            elif self.is_meant(label):
                asked[name] += 1
                yield {
                    "key": f"{name}#{asked[name]}", "imgname": name, "sha256": found, "query": query, "label": label,
                    "source": source, "table": self._table(name),
                }  # fmt: skip

    def left_out(self) -> dict[str, Any]:
        """Describe the last reading for JSON."""
        return count_reasons(self.bad, total=len(self.rows), unit="question")

    def _picture(self, name: str) -> tuple[str, str]:
        """(what is wrong with a picture, its SHA-256), looked at once."""
        if name not in self._faults:
            try:
                content = (self.place / "png" / name).read_bytes()
                found = hashlib.sha256(content).hexdigest()
                if self.decodes:
                    read_image(content)
                self._faults[name] = ("", found)
            except ImageError as error:
                self._faults[name] = (error.reason, found)
            except (OSError, ValueError):  # ValueError: a path with a NUL
                self._faults[name] = ("image file is missing or not readable", "")
        return self._faults[name]

    def _table(self, name: str) -> str:
        path = (self.place / "tables" / name).with_suffix(".csv")
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def find_split(place: Path, split: str) -> tuple[Path, dict[str, Path]]:
    """Find the folder of a split and its files of questions, by source.

    ``SPLIT/png``, ``SPLIT/tables`` and ``SPLIT/SPLIT_human.json`` as published, in `place` or in its folder
    ``ChartQA Dataset``, or the same without the folder SPLIT. What is missing is not in the answer.
    """
    for folder in (place / split, place / "ChartQA Dataset" / split, place):
        files = {source: folder / f"{split}_{source}.json" for source in SOURCES}
        found = {source: path for source, path in files.items() if path.is_file()}
        if found:
            return folder, found
    return place / split, {}


def make_published_source(
    split: str,
    prompt: str,
    *,
    data_dir: str | None,
    sources: Sequence[str] = SOURCES,
    numeric: bool = False,
    max_bad: int | None = None,
    prepare_in: str | None = None,
    form: str,
) -> RecordSource:
    """Open a split of the published questions; the pictures are read when they are asked for.

    A question is left out, counted by reason, if it is no object of three texts ``imgname``, ``query`` and ``label`` (a
    list of one text is that text), if its picture cannot be read (see `train.image_files.read_image`), or if it is
    asked about the same picture in a later split too (test after val after train). Labels are never mended.

    Args:
      split: "train", "val" or "test".
      prompt: with {} for the question.
      data_dir: see `find_split`; None is refused.
      sources: of questions: "human", "augmented".
      numeric: take the questions whose label is a number alone.
      max_bad: refuse the folder when more questions are bad; None leaves out any number.
      prepare_in: folder of prepared data; None is `default_data_dir()`.
      form: of the prompt; part of the fingerprint.

    Raises:
      DataError: no such files, no good question for the split, or too many bad ones.
    """
    if not data_dir:
        raise DataError("chartqa: give --data_dir=FOLDER with the published folder of ChartQA.")
    path = Path(data_dir)
    is_meant = _is_number if numeric else lambda label: True
    reader = QuestionReader(path=path, is_meant=is_meant, **_read(path, split, sources))
    reader.taken = frozenset(
        question_hash(name_question(record["query"], record["sha256"]))
        for other in _BEHIND[split]
        if find_split(path, other)[1]
        for record in QuestionReader(path=path, decodes=False, **_read(path, other, SOURCES))()
    )
    if max_bad is not None:  # before anything is written
        for _ in reader():
            pass
        refuse_beyond(path, reader.left_out(), max_bad)
    names = sorted({name for _, _, row in reader.rows if (name := _parts(row)[1])})
    pictures = [(name, digest_or_none(reader.place / "png" / name)) for name in names]
    parts = (CHARTQA_FILES_VERSION, numeric, reader.rows, pictures, sorted(reader.taken))
    name = f"published-{split}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
    builder = prepare_builder(ChartQAQuestions, RecordConfig(name=name, records={split: reader}), data_dir=prepare_in)
    left_out = builder.info.metadata[f"{split}_left_out"]

    def make_example(index: int, record: Record) -> Example:
        image = (reader.place / "png" / record["imgname"]).read_bytes()
        return Example(key=record["key"], prompt=prompt.format(record["query"]), answer=record["label"], image=image)

    notes = notes_on(path, left_out)
    if missing := [f"{split}_{source}.json" for source in sources if source not in find_split(path, split)[1]]:
        notes.append(f"{path.name}: {' and '.join(missing)} is missing, so its questions are not in split {split}.")
    return RecordSource(builder, split, make_example, form=form, notes=notes)


def _read(path: Path, split: str, sources: Sequence[str]) -> dict[str, Any]:
    """The `place` and `rows` of a `QuestionReader`."""
    place, files = find_split(path, split)
    missing = [source for source in sources if source not in files]
    if len(missing) == len(sources):
        names = " or ".join(f"{split}_{source}.json" for source in sources)
        raise DataError(
            f"chartqa: {path} has no {names} for split {split}: --data_dir is the published folder, with "
            f"{split}/png and {split}/{names}, or one folder with png and these files."
        )
    rows = []
    for source in sources:
        for number, row in enumerate(_rows(files[source]) if source in files else ()):
            rows.append((source, number, row))
    return {"place": place, "rows": rows}


def _rows(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"), parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: wanted a list of objects with imgname, query and label.")
    return rows


def _parts(row: Any) -> tuple[str, str, str, str]:
    """(what is wrong, imgname, query, label)."""
    fields = row if isinstance(row, dict) else {}
    label = fields.get("label")
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    texts = (fields.get("imgname"), fields.get("query"), label)
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return "no texts imgname, query and label", "", "", ""
    return ("", *texts)


def _is_number(label: str) -> bool:
    return parse_float(label) is not None
