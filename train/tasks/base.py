"""What every task is made of: an example, a source of examples, and one row of the task table."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

_READ_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One question with its answer.

    Args:
      key: name of the example within its split, unique there.
      prompt: the text before the answer, exactly as the model reads it, separator included.
      answer: the text to be learnt, without the end-of-sequence token.
      image: an encoded image (PNG or JPEG bytes), or None.
    """

    key: str
    prompt: str
    answer: str
    image: bytes | None = None


class Source(Protocol):
    """A split in random access: what `make_source` returns.

    `fingerprint` changes whenever any example or their order changes. `__getitems__`, where present, reads many
    examples at once and is preferred; `notes`, where present, are sentences for the header of a run.
    """

    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


def stream_examples(source: Source) -> Iterator[Example]:
    """Yield every example of a source in order, read a few hundred at once: with images thousands fill the memory."""
    read_many = getattr(source, "__getitems__", None) or (lambda indices: [source[index] for index in indices])
    for first in range(0, len(source), _READ_AT_ONCE):
        yield from read_many(range(first, min(first + _READ_AT_ONCE, len(source))))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the task table.

    Args:
      name: value of ``--task``.
      summary: one line of help.
      train_split: split that training reads.
      eval_split: split that evaluation reads unless told otherwise.
      splits: every split.
      variants: every value of `variant`, the default first.
      grader: row of `train.graders.GRADERS`.
      defaults: overrides of the training defaults for the default run of this task.
      pretrained_defaults: overrides of those where the backbone has pretrained weights.
      chat: whether a question is put to the model in its chat template, as one message of the user; needs a model that
        has one.
      chat_variants: the variants for which that holds although `chat` is false.
      file_variants: the variants for which `data_dir` holds files of the user's, beside which nothing is written.
      options: further fields of the config that `make_source` takes -> the variants that have a use for them.
      max_new_tokens: tokens of a generated answer that does not end by itself; no shorter than the task's own answers.
      make_source: ``make_source(split, *, data_dir=None, seed=0, variant=variants[0]) -> Source``; the seed is the
        option data_seed.
    """

    name: str
    summary: str
    train_split: str
    eval_split: str
    splits: tuple[str, ...]
    variants: tuple[str, ...]
    grader: str
    defaults: Mapping[str, object]
    make_source: Callable[..., Source]
    chat: bool = False
    pretrained_defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    chat_variants: tuple[str, ...] = ()
    file_variants: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    max_new_tokens: int = 32

    def is_chat(self, variant: str) -> bool:
        """Say whether the questions of a variant are put as chats; "" is the first variant."""
        return self.chat or (variant or self.variants[0]) in self.chat_variants

    def takes_files(self, variant: str) -> bool:
        """Say whether the data of a variant are files of the user's; "" is the first variant."""
        return (variant or self.variants[0]) in self.file_variants

    def has_option(self, name: str, variant: str) -> bool:
        """Say whether a variant has a use for a field of the config; "" is the first variant."""
        return (variant or self.variants[0]) in self.options.get(name, ())
