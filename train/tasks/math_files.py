"""DeepMind Mathematics as it was released: its text files, or TFDS's math_dataset where it is prepared."""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import tensorflow_datasets as tfds

from train.exits import DataError, UsageError
from train.tasks.base import Example
from train.tasks.math_data import LEVELS, SIZES, MathModules
from train.tasks.prepared import Record, RecordConfig, RecordSource, prepare_builder
from train.tasks.questions import question_hash

# Variant -> the modules' names without "arithmetic__"; the second is the small set of the Number Token Loss.
RELEASED_VARIANTS = {
    "released": None,
    "released_tfds": None,
    "released_add_sub_multiple": ("add_sub_multiple", "add_sub_multiple_longer"),
}
_ARCHIVE_FOLDER = "mathematics_dataset-v1.0"
_TFDS_FOLDER = "math_dataset"
_PREFIX = "arithmetic__"
_FOLDERS = {"train": LEVELS, **{name: (name,) for name in SIZES if name != "train"}}


def read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Read a released file: a line with a question, a line with its answer, and so on.

    Raises:
      DataError: an odd number of lines, an empty line, or text that is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                question, answer = line.strip(), next(stream, "").strip()
                if not question or not answer:
                    raise DataError(
                        f"{path}: question {number} lacks a line; wanted questions and answers on alternating lines."
                    )
                yield question, answer
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}.") from error


def read_prepared_pairs(folder: Path, split: str) -> Iterator[tuple[str, str]]:
    """Read a split of TFDS's own math_dataset from the folder of one of its configurations and versions.

    Raises:
      DataError: no such split, or a file format that TFDS reads with TensorFlow alone.
    """
    try:
        records = tfds.builder_from_directory(str(folder)).as_data_source(split=split)
    except (ValueError, NotImplementedError, KeyError) as error:
        raise DataError(
            f"{folder}: split {split} cannot be read without TensorFlow ({str(error).splitlines()[0]}); prepare "
            f"{_TFDS_FOLDER} with file_format='array_record'."
        ) from error
    for index in range(len(records)):
        record = records[index]
        yield record["question"].decode().strip(), record["answer"].decode().strip()


def read_records(files: list[tuple[str, Path]], *, examples: int | None, taken: frozenset[int]) -> Iterator[Record]:
    """Read released files in turn.

    Args:
      files: (regime, path) pairs; a path that is a folder is one of TFDS's.
      examples: the first so many questions of each file; None takes all.
      taken: hashes of questions that another split has; they are passed over.
    """
    for regime, path in files:
        free = (pair for pair in _pairs(regime, path) if question_hash(pair[0]) not in taken)
        for question, answer in islice(free, examples):
            module = path.parent.name if path.is_dir() else path.stem
            yield {"question": question, "answer": answer, "module": module, "regime": regime}


def make_released_source(
    split: str,
    *,
    variant: str,
    separator: str,
    data_dir: str | None = None,
    examples: Mapping[str, int] | None = None,
    prepare_in: str | None = None,
) -> RecordSource:
    """Open a split of the released data.

    Args:
      split: "train" (the three levels, one after the other), one of them, "interpolate" or "extrapolate"; TFDS's copy
        has "train" and "interpolate" (its split test) only.
      variant: of `RELEASED_VARIANTS`.
      separator: what follows the question in a prompt.
      data_dir: folder that holds ``mathematics_dataset-v1.0``, or the folders ``train-easy`` and so on themselves; for
        "released_tfds", ``math_dataset`` as TFDS prepared it in the format array_record.
      examples: questions of each file of a split; the default is 33,333 for training and all for the others.
      prepare_in: folder of prepared data; None is `default_data_dir()`.

    Raises:
      UsageError: an unknown split, with the known ones.
      DataError: no such files.
    """
    if split not in SIZES:
        raise UsageError(f"arith: unknown split {split!r}; known splits: {', '.join(SIZES)}.")
    files = _files(split, variant, data_dir)
    if not files:
        place = data_dir or "an unset --data_dir"
        if variant == "released_tfds":
            raise DataError(
                f"arith: no split {split} in {_TFDS_FOLDER}/{_PREFIX}* below {place}; TFDS's copy has train and "
                "interpolate, once it is prepared there in the format array_record."
            )
        raise DataError(
            f"arith: no {_PREFIX}*.txt in {' or '.join(_FOLDERS[split])} below {place}; give --data_dir=FOLDER that "
            f"holds {_ARCHIVE_FOLDER} of the released archive."
        )
    is_train = split.startswith("train")
    count = (examples or {}).get(split, SIZES["train-easy"] if is_train else None)
    others = [file for other in ("interpolate", "extrapolate") for file in _files(other, variant, data_dir)]
    held_out = (pair for other in others for pair in _pairs(*other)) if is_train else ()
    taken = frozenset(question_hash(question) for question, _ in held_out)
    parts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for _, path in files + others]
    name = f"{variant}-{split}-{hashlib.sha256(repr((count, parts)).encode()).hexdigest()[:12]}"
    config = RecordConfig(name=name, records={split: lambda: read_records(files, examples=count, taken=taken)})

    def make_example(index: int, record: Record) -> Example:
        return Example(key=f"{split}-{index}", prompt=record["question"] + separator, answer=record["answer"])

    return RecordSource(prepare_builder(MathModules, config, data_dir=prepare_in), split, make_example)


def _files(split: str, variant: str, data_dir: str | None) -> list[tuple[str, Path]]:
    if not data_dir:
        return []
    root, modules = Path(data_dir), RELEASED_VARIANTS[variant]
    if variant == "released_tfds":
        folders = sorted((root / _TFDS_FOLDER).glob(f"{_PREFIX}*/*/dataset_info.json"))
        return [(split, info.parent) for info in folders] if split in ("train", "interpolate") else []
    root = root / _ARCHIVE_FOLDER if (root / _ARCHIVE_FOLDER).is_dir() else root
    return [
        (folder, path)
        for folder in _FOLDERS[split]
        for path in sorted((root / folder).glob(f"{_PREFIX}*.txt"))
        if modules is None or path.stem.removeprefix(_PREFIX) in modules
    ]


def _pairs(regime: str, path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        return read_prepared_pairs(path, "test" if regime == "interpolate" else regime)
    return read_pairs(path)
