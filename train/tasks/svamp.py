"""SVAMP: a challenge set of a thousand short word problems for models that were trained elsewhere, here on GSM8K."""

import json
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path

from train.exits import DataError, UsageError
from train.tasks import gsm8k
from train.tasks.base import Example, Task
from train.tasks.prepared import Record, RecordBuilder, RecordConfig, RecordSource, prepare_builder
from train.tasks.published import PublishedFile, digest, locate
from train.tasks.questions import make_prompt

FILE = PublishedFile(
    folder="svamp",
    name="SVAMP.json",
    url="https://raw.githubusercontent.com/arkilpatel/SVAMP/main/SVAMP.json",
    sha256="5be77703a6d891ae476d7c082787ad361392aa02453b132516cdd5f4e7934e3e",
)
SPLITS = ("train", "test")
# gsm8k's variant, and whether a body without a full stop gets one before the question.
VARIANTS = {name: (name, False) for name in gsm8k.VARIANTS}
VARIANTS |= {"plain_stop": ("plain", True), "chat_stop": ("chat", True)}
_STOPS = (".", "!", "?", '"')


class Svamp(RecordBuilder):
    """Elementary word problems with a body and a question of their own (Patel, Bhattamishra, Goyal, 2021; MIT)."""

    FIELDS = ("id", "body", "question", "equation", "answer", "type")


def join_question(body: str, question: str, *, add_stop: bool = False) -> str:
    """Join the two parts of a problem by a blank, as OpenCompass does.

    Args:
      body, question: as published; 358 of the 1,000 bodies do not end in a full stop.
      add_stop: give those one, so that the two sentences do not run together.

    Example:
      >>> join_question("He had 3 on each tree", "How many?"), join_question("He had 3", "How many?", add_stop=True)
      ('He had 3 on each tree How many?', 'He had 3. How many?')
    """
    body = body.strip()
    if add_stop and not body.endswith(_STOPS):
        body += "."
    return f"{body} {question.strip()}"


def plain_answer(answer: str) -> str:
    """Write a published answer as people do: a whole number without ".0", any other without trailing zeros.

    Example:
      >>> plain_answer("51.0"), plain_answer("2.50"), plain_answer("22090603.0")
      ('51', '2.5', '22090603')
    """
    text = f"{Decimal(answer):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def read_records(path: Path) -> Iterator[Record]:
    """Read the published file, a JSON list; numbers keep their digits, so answers are texts such as "51.0".

    Raises:
      DataError: another shape, or an answer that is no number.
    """
    fields = {field: "ID" if field == "id" else field.capitalize() for field in Svamp.FIELDS}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"), parse_float=str, parse_int=str)
        for row in rows:
            record = {field: str(row[name]) for field, name in fields.items()}
            plain_answer(record["answer"])
            yield record
    except (ValueError, ArithmeticError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: wanted a list of objects with {', '.join(fields.values())}, Answer a number; {error!r}."
        ) from error


def make_source(
    split: str, *, data_dir: str | None = None, seed: int = 0, variant: str = "plain", prepare_in: str | None = None
) -> RecordSource:
    """Open SVAMP's one split, or GSM8K's training split to learn from.

    Args:
      split: "test" is the whole challenge set; "train" is the training split of `train.tasks.gsm8k`.
      data_dir: folder that holds ``svamp/SVAMP.json`` (and ``gsm8k/``), or the files themselves.
      seed: has no effect; the data are fixed.
      variant: one of gsm8k's, or "plain_stop" and "chat_stop", which end every body with a full stop.
      prepare_in: folder of prepared data; None is `default_data_dir()`.

    Raises:
      UsageError: an unknown split or variant, with the known ones.
      DataError: files that are missing or malformed.
    """
    if split not in SPLITS:
        raise UsageError(f"svamp: unknown split {split!r}; known splits: {', '.join(SPLITS)}.")
    if variant not in VARIANTS:
        raise UsageError(f"svamp: unknown variant {variant!r}; known variants: {', '.join(VARIANTS)}.")
    train_variant, add_stop = VARIANTS[variant]
    if split == "train":
        return gsm8k.make_source("train", data_dir=data_dir, variant=train_variant, prepare_in=prepare_in)
    path = locate(FILE, data_dir=data_dir)
    config = RecordConfig(name=f"published-{digest(path)[:12]}", records={"test": partial(read_records, path)})
    form, _ = gsm8k.VARIANTS[train_variant]

    def make_example(index: int, record: Record) -> Example:
        question = join_question(record["body"], record["question"], add_stop=add_stop)
        return Example(key=record["id"], prompt=make_prompt(question, form), answer=plain_answer(record["answer"]))

    return RecordSource(
        prepare_builder(Svamp, config, data_dir=prepare_in), split, make_example, form=f"{variant}-prompt1"
    )


SVAMP = Task(
    name="svamp",
    summary="a thousand short word problems to test on; the training split is GSM8K's (published files or download)",
    train_split="train",
    eval_split="test",
    splits=SPLITS,
    variants=tuple(VARIANTS),
    chat_variants=("chat", "chat_stripped", "chat_stop"),
    grader="gsm8k_flexible",
    file_variants=tuple(VARIANTS),
    max_new_tokens=512,
    defaults=gsm8k.GSM8K.defaults,
    pretrained_defaults=gsm8k.GSM8K.pretrained_defaults,
    make_source=make_source,
)
