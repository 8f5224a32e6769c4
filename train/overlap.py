"""Questions that two splits share, counted by hash: a million against a hundred thousand in seconds, memory flat."""

import dataclasses
from collections.abc import Iterable, Iterator

from train.tasks.base import Source, stream_examples
from train.tasks.questions import name_example, question_hash

_EXAMPLES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """What two lists of questions share.

    Args:
      train_rows, test_rows: questions in each.
      shared_train_rows: rows of train whose question is in test.
      shared_test_rows: rows of test whose question is in train.
      repeated_test_rows: rows of test whose question came earlier in test.
      examples: the first shared questions, as (row of train, row of test, question as train has it).
    """

    train_rows: int
    test_rows: int
    shared_train_rows: int
    shared_test_rows: int
    repeated_test_rows: int
    examples: tuple[tuple[int, int, str], ...]

    def __str__(self) -> str:
        lines = [
            f"{self.shared_test_rows:,} of {self.test_rows:,} test questions occur in train "
            f"({self.shared_train_rows:,} of its {self.train_rows:,} rows); "
            f"{self.repeated_test_rows:,} test questions are repeated within test."
        ]
        lines += [f"  train {row}, test {other}: {text[:100]!r}" for row, other, text in self.examples]
        return "\n".join(lines)


def overlap(train: Iterable[str], test: Iterable[str]) -> Overlap:
    """Count the questions that two splits share, equal up to case and blanks.

    Args:
      train: questions; read once and not kept, so a generator may be of any length.
      test: questions; a number of 64 bits of each is kept.

    Example:
      >>> report = overlap(["2 + 2?", "1 + 1?"], ["3 + 3?", "2 +  2?"])
      >>> report.shared_test_rows, report.examples
      (1, ((0, 1, '2 + 2?'),))
    """
    row_of: dict[int, int] = {}
    rows_with: dict[int, int] = {}
    test_rows = 0
    for test_rows, question in enumerate(test, start=1):
        code = question_hash(question)
        if row_of.setdefault(code, test_rows - 1) != test_rows - 1:
            rows_with[code] = rows_with.get(code, 1) + 1
    shared: set[int] = set()
    examples: list[tuple[int, int, str]] = []
    train_rows = shared_train_rows = 0
    for train_rows, question in enumerate(train, start=1):
        code = question_hash(question)
        if code in row_of:
            shared_train_rows += 1
            if code not in shared and len(examples) < _EXAMPLES:
                examples.append((train_rows - 1, row_of[code], question))
            shared.add(code)
    return Overlap(
        train_rows=train_rows,
        test_rows=test_rows,
        shared_train_rows=shared_train_rows,
        shared_test_rows=sum(rows_with.get(code, 1) for code in shared),
        repeated_test_rows=test_rows - len(row_of),
        examples=tuple(examples),
    )


def prompts_of(source: Source) -> Iterator[str]:
    """Stream what the examples of a source ask, for `overlap`: their prompts, and the digests of their images.

    Of one task and variant, since prompts differ between them.
    """
    for example in stream_examples(source):
        yield name_example(example)
