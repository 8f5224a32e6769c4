"""GSM8K: grade-school word problems whose answers are worked solutions that end in ``#### N``."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType

from train.exits import DataError, UsageError
from train.tasks.base import Example, Task
from train.tasks.prepared import Record, RecordBuilder, RecordConfig, RecordSource, prepare_builder
from train.tasks.published import PublishedFile, digest, locate
from train.tasks.questions import check_disjoint, make_prompt

_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
FILES = {
    "train": PublishedFile(
        folder="gsm8k",
        name="train.jsonl",
        url=_URL + "train.jsonl",
        sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    ),
    "test": PublishedFile(
        folder="gsm8k",
        name="test.jsonl",
        url=_URL + "test.jsonl",
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    ),
}
# The prompt's form, and whether the calculator's marks <<...>> stay in the solutions, as published, or are stripped.
VARIANTS = {
    "plain": ("plain", False),
    "plain_stripped": ("plain", True),
    "chat": ("chat", False),
    "chat_stripped": ("chat", True),
}
_MARKS = re.compile(r"<<[^<>]*>>")
_FINAL = "#### "


def strip_marks(solution: str) -> str:
    """Take the notes of the calculator out of a solution; nothing else changes.

    Example:
      >>> strip_marks("16 - 3 = <<16-3=13>>13 eggs")
      '16 - 3 = 13 eggs'
    """
    return _MARKS.sub("", solution)


class Gsm8k(RecordBuilder):
    """Grade-school mathematics word problems: question, worked solution, final answer (Cobbe et al., 2021; MIT)."""

    FIELDS = ("question", "answer", "final")


def read_records(path: Path) -> Iterator[Record]:
    """Read a published file, one JSON object a line; any fault is an error, since the file is not the user's to mend.

    Raises:
      DataError: a line that is no object of texts `question` and `answer`, or an answer without its ``#### `` line.
    """
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = json.loads(line)
                question, answer = row["question"], row["answer"]
                solution, mark, final = answer.rpartition(_FINAL)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{path}, line {number}: wanted question and answer as texts; {error!r}.") from error
            if not (isinstance(question, str) and mark and final.strip() and solution.endswith("\n")):
                raise DataError(f"{path}, line {number}: the answer has no last line '#### N'.")
            yield {"question": question, "answer": answer, "final": final.strip()}


def make_source(
    split: str, *, data_dir: str | None = None, seed: int = 0, variant: str = "plain", prepare_in: str | None = None
) -> RecordSource:
    """Open a split of GSM8K.

    Args:
      split: "train" or "test".
      data_dir: folder that holds ``gsm8k/train.jsonl`` and ``gsm8k/test.jsonl``, or the files themselves; see
        `train.tasks.published.locate` for a download.
      seed: has no effect; the data are fixed.
      variant: "plain" or "chat", with "_stripped" for solutions without the calculator's marks.
      prepare_in: folder of prepared data; None is `default_data_dir()`.

    Raises:
      UsageError: an unknown split or variant, with the known ones.
      DataError: files that are missing or malformed, or splits that share a question.
    """
    if split not in FILES:
        raise UsageError(f"gsm8k: unknown split {split!r}; known splits: {', '.join(FILES)}.")
    if variant not in VARIANTS:
        raise UsageError(f"gsm8k: unknown variant {variant!r}; known variants: {', '.join(VARIANTS)}.")
    paths = {name: locate(file, data_dir=data_dir) for name, file in FILES.items()}
    name = "-".join(digest(path)[:12] for path in paths.values())
    questions = {name: (record["question"] for record in read_records(path)) for name, path in paths.items()}
    check_disjoint("gsm8k", questions["train"], questions["test"])
    config = RecordConfig(
        name=f"published-{name}", records={split: partial(read_records, path) for split, path in paths.items()}
    )
    form, stripped = VARIANTS[variant]

    def make_example(index: int, record: Record) -> Example:
        answer = strip_marks(record["answer"]) if stripped else record["answer"]
        return Example(key=f"{split}-{index}", prompt=make_prompt(record["question"], form), answer=answer)

    return RecordSource(
        prepare_builder(Gsm8k, config, data_dir=prepare_in), split, make_example, form=f"{variant}-prompt1"
    )


GSM8K = Task(
    name="gsm8k",
    summary="grade-school word problems with worked solutions (published files, or a download of 5 MB)",
    train_split="train",
    eval_split="test",
    splits=tuple(FILES),
    variants=tuple(VARIANTS),
    chat_variants=("chat", "chat_stripped"),
    grader="gsm8k_flexible",
    file_variants=tuple(VARIANTS),
    max_new_tokens=512,
    # The digit-level tokenizer makes up to 1,701 tokens of an example, those of real models less than half.
    defaults=MappingProxyType({"max_length": 2048, "batch_size": 8, "eval_batch_size": 16}),
    pretrained_defaults=MappingProxyType({"max_length": 1024, "learning_rate": 1e-5}),
    make_source=make_source,
)
