"""Prepared data: records written once to array_record files by a TensorFlow Datasets builder, read in random access."""

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging

from train.exits import DataError
from train.tasks.base import Example

_PATIENCE_SECONDS = 5.0

Record = Mapping[str, str | bytes]


def default_data_dir() -> str:
    """Folder for prepared data: ``smmd_jax/data`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``)."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smmd_jax" / "data")


@dataclasses.dataclass(kw_only=True, eq=False)
class RecordConfig(tfds.core.BuilderConfig):
    """Configuration whose name must say all that the records depend on: TFDS reuses prepared files by name alone.

    Args:
      records: split -> function that yields its records, in order, as often as it is called.
    """

    records: Mapping[str, Callable[[], Iterable[Record]]] = dataclasses.field(default_factory=dict)


class RecordBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Base of builders whose records are texts, and encoded images perhaps; a subclass has a docstring and names its
    `FIELDS`, and those of them that are `BYTES`.

    Not registered by name: TFDS refuses a second class of one name, and a notebook may load a module again.
    """

    VERSION = tfds.core.Version("1.0.0")
    FIELDS: tuple[str, ...] = ()
    BYTES: tuple[str, ...] = ()

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict({field: tfds.features.Text() for field in self.FIELDS}),
            disable_shuffling=True,  # the order of the file is the order of the source; Grain shuffles each epoch
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager: object) -> dict[str, Iterator[tuple[int, Record]]]:
        return {split: self._generate_examples(split, make) for split, make in self.builder_config.records.items()}

    def _generate_examples(self, split: str, make: Callable[[], Iterable[Record]]) -> Iterator[tuple[int, Record]]:
        content, key = hashlib.sha256(), -1
        for key, record in enumerate(make()):
            texts = [_shown(record[field]) for field in self.FIELDS]
            content.update(json.dumps(texts).encode() + b"\n")
            yield key, record
        if key < 0:
            raise DataError(f"split {split} of {self.builder_config.name} has no examples.")
        self.info.metadata[split] = content.hexdigest()


class RecordSource:
    """One prepared split in random access; records are read from array_record files when asked for.

    Args:
      builder: a prepared builder whose metadata hold a digest of each split.
      split: one of its splits.
      make_example: (index, record) -> Example.
      form: whatever the examples depend on besides the records; part of the fingerprint.
      notes: sentences that the user of the data has to read.
    """

    def __init__(
        self,
        builder: tfds.core.DatasetBuilder,
        split: str,
        make_example: Callable[[int, Record], Example],
        *,
        form: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        self.split = split
        self.notes = tuple(notes)
        content = f"{builder.info.full_name}/{split}/{builder.info.metadata[split]}"
        self.fingerprint = f"{content}/{form}" if form else content
        self._bytes = frozenset(getattr(builder, "BYTES", ()))
        self._records = builder.as_data_source(split=split)
        self._make_example = make_example

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Example:
        return self._example(index, self._records[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self._example(*pair) for pair in zip(indices, self._records.__getitems__(indices), strict=True)]

    def _example(self, index: int, record: Mapping[str, bytes]) -> Example:
        record = {name: value if name in self._bytes else value.decode() for name, value in record.items()}
        return self._make_example(index, record)


def _shown(value: str | bytes) -> str:
    return value if isinstance(value, str) else hashlib.sha256(value).hexdigest()


def prepare_builder(
    builder_class: type[tfds.core.GeneratorBasedBuilder], config: Any, *, data_dir: str | None = None
) -> tfds.core.DatasetBuilder:
    """Write the data of a builder unless they are there already; safe when several processes of a machine ask at once.

    Args:
      builder_class: a `RecordBuilder`, or any builder without TensorFlow.
      config: its configuration.
      data_dir: folder of prepared data; None is `default_data_dir()`.

    Returns:
      The prepared builder.
    """
    root = Path(data_dir or default_data_dir()).absolute()
    root.mkdir(parents=True, exist_ok=True)
    tfds.disable_progress_bar()
    # TFDS writes to a temporary folder and renames it; without the lock the slower of two writers fails at the rename.
    what = f"preparing {config.name} in {root}, which is done once"
    with _said_after(_PATIENCE_SECONDS, what), open(root / f".{config.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _quiet_tfds():
            builder = builder_class(config=config, data_dir=str(root), file_format="array_record")
            builder.download_and_prepare()
    return builder


@contextlib.contextmanager
def _said_after(seconds: float, what: str) -> Iterator[None]:
    """Say on stderr what is being done where it takes long: a minute of silence looks like a hang."""
    timer = threading.Timer(seconds, print, args=[f"{what} ..."], kwargs={"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """TFDS announces every preparation on stdout and warns of each configuration that it does not list."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
