"""A data set of one's own: JSON lines with prompt and answer, or question and answer, and an image perhaps."""

import hashlib
import re
from pathlib import Path
from types import MappingProxyType

from train.exits import DataError, UsageError
from train.tasks.base import Example, Task
from train.tasks.json_lines import READER_VERSION, TEST_SHARE, JsonLines, name_record
from train.tasks.left_out import CountingBuilder, notes_on, refuse_beyond
from train.tasks.prepared import Record, RecordConfig, RecordSource, prepare_builder
from train.tasks.published import digest
from train.tasks.questions import make_prompt, question_hash

SPLITS = ("train", "test")
# The prompt's form, and whether one bad line refuses the file.
VARIANTS = {
    "plain": ("plain", False),
    "plain_strict": ("plain", True),
    "chat": ("chat", False),
    "chat_strict": ("chat", True),
}


class Jsonl(CountingBuilder):
    """Questions and answers of a user's own, from files of one JSON object a line."""

    FIELDS = ("kind", "question", "answer", "image", "image_sha256", "line")


def make_source(
    split: str,
    *,
    data_dir: str | None = None,
    seed: int = 0,
    variant: str = "plain",
    limit: int | None = None,
    max_bad_lines: int | None = None,
    prepare_in: str | None = None,
) -> RecordSource:
    """Open a split of one's own data.

    A line is ``{"prompt": ..., "answer": ...}``, where the prompt is the text that the model reads, separator included,
    or ``{"question": ..., "answer": ...}``, where the fixed prompt of `train.tasks.questions` goes around it (in a chat
    variant both are the user's message). An answer that is a JSON number keeps the digits it is written with. "image",
    where it stands, is a path relative to the file. Other fields are passed over, and so are blank lines.

    Args:
      split: "train" or "test".
      data_dir: a folder with ``train.jsonl`` and ``test.jsonl``, or one file of both: there a hash of
        the question tells them apart.
      seed: has no effect; the data are fixed.
      variant: "plain" or "chat"; with "_strict" one bad line refuses the file.
      limit: use no more than so many examples of the split, the first ones; None uses all.
      max_bad_lines: refuse the file when more lines are bad; None leaves out any number, and `notes` says which.
      prepare_in: folder of prepared data; None is `default_data_dir()`.

    Raises:
      UsageError: an unknown split or variant, with the known ones, or a limit below 1.
      DataError: no file, no good line, or too many bad ones, counted by reason with line numbers.
    """
    if split not in SPLITS:
        raise UsageError(f"jsonl: unknown split {split!r}; known splits: {', '.join(SPLITS)}.")
    if variant not in VARIANTS:
        raise UsageError(f"jsonl: unknown variant {variant!r}; known variants: {', '.join(VARIANTS)}.")
    if limit is not None and limit < 1:
        raise UsageError(f"jsonl: limit must be at least 1, got {limit}.")
    form, strict = VARIANTS[variant]
    path, is_shared, test = _find(split, data_dir)
    others = [test] if test and split == "train" else []
    lines = JsonLines(path=path, split=split, is_shared=is_shared, limit=limit, taken=_taken(others))
    files = [digest(file) for file in (path, *others)]
    parts = (READER_VERSION, limit, is_shared, str(path.resolve().parent), files, lines.image_digests())
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", path.stem)
    name = f"{stem}-{split}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
    if strict or max_bad_lines is not None:  # before anything is written
        for _ in lines():
            pass
        refuse_beyond(path, lines.left_out(), 0 if strict else max_bad_lines)
    builder = prepare_builder(Jsonl, RecordConfig(name=name, records={split: lines}), data_dir=prepare_in)
    left_out = builder.info.metadata[f"{split}_left_out"]

    def make_example(index: int, record: Record) -> Example:
        is_question = record["kind"] == "question"
        prompt = make_prompt(record["question"], form) if is_question else record["question"]
        image = (path.parent / record["image"]).read_bytes() if record["image"] else None
        return Example(key=f"{path.name}-{record['line']}", prompt=prompt, answer=record["answer"], image=image)

    notes = notes_on(path, left_out)
    return RecordSource(builder, split, make_example, form=f"{form}-prompt1", notes=notes)


def _find(split: str, data_dir: str | None) -> tuple[Path, bool, Path | None]:
    """The file of a split, whether it holds both splits, and the file of the test split where it is another."""
    if not data_dir:
        raise DataError("jsonl: give --data_dir=FOLDER with train.jsonl and test.jsonl, or --data_dir=FILE.jsonl.")
    place = Path(data_dir)
    if place.is_file():
        return place, True, None
    path, test = place / f"{split}.jsonl", place / "test.jsonl"
    if not path.is_file():
        raise DataError(
            f"jsonl: {path} is missing; --data_dir is a folder with train.jsonl and test.jsonl, or one file, of which "
            f"one question in {TEST_SHARE} is the test split."
        )
    return path, False, test if test.is_file() else None


def _taken(others: list[Path]) -> frozenset[int]:
    readers = [JsonLines(path=other, split="test", decodes=False) for other in others]
    return frozenset(question_hash(name_record(record)) for reader in readers for record in reader())


JSONL = Task(
    name="jsonl",
    summary="your own questions and answers: --data_dir=FOLDER with train.jsonl and test.jsonl, or one file",
    train_split="train",
    eval_split="test",
    splits=SPLITS,
    variants=tuple(VARIANTS),
    chat_variants=("chat", "chat_strict"),
    grader="math_value",
    file_variants=tuple(VARIANTS),
    # A strict variant says already how many lines may be bad.
    options=MappingProxyType({"limit": tuple(VARIANTS), "max_bad_lines": ("plain", "chat")}),
    max_new_tokens=256,
    defaults=MappingProxyType({}),
    make_source=make_source,
)
