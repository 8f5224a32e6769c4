"""Predictions of any program, graded: a file of JSON lines with a prediction and its gold answer each."""

import json
from pathlib import Path
from typing import Any

from train.evaluation import EvaluateFlags
from train.exits import DataError, UsageError
from train.scoring import Scored, grade_answers
from train.tasks import TASKS
from train.tasks.base import Example
from train.tasks.published import digest


class GradedFile:
    """A file of predictions as the subject of an evaluation.

    Attributes:
      name: of the results.
      inputs: all that the grades depend on.
      notes: sentences for the user; none.

    Raises:
      UsageError: no such file, or an unknown grader.
    """

    notes = ()

    def __init__(self, flags: EvaluateFlags) -> None:
        self._path = Path(flags.predictions)
        if not self._path.is_file():
            raise UsageError(f"predictions={self._path} is not a file.")
        self._grader = flags.grader or TASKS[flags.task].grader
        self.name = f"{self._path.stem}-{self._grader}"
        self.inputs = {
            "predictions": self._path.name,
            "sha256": digest(self._path),
            "grader": self._grader,
        }

    def score(self) -> tuple[Scored, None]:
        """Grade every line.

        Raises:
          DataError: a line that is no prediction; none is passed over.
        """
        return grade_answers(read_predictions(self._path), self._grader), None


def read_predictions(path: Path) -> list[tuple[Example, str]]:
    """Read (example, prediction) pairs: objects with `prediction` and `answer`, `prompt` and `key` where they stand.

    A JSON number is taken as the text it is written with. Blank lines are passed over.

    Raises:
      DataError: a line that is no such object, with its number, or no line at all.
    """
    pairs = []
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"), parse_int=str, parse_float=str, parse_constant=str)
            except ValueError as error:  # also UnicodeDecodeError
                raise DataError(f"{path}, line {number} is not JSON: {error}.") from error
            pairs.append(_pair(row, f"{path}, line {number}", number))
    if not pairs:
        raise DataError(f"{path} holds no predictions.")
    return pairs


def _pair(row: Any, where: str, number: int) -> tuple[Example, str]:
    fields = row if isinstance(row, dict) else {}
    for name in ("prediction", "answer"):
        if not isinstance(fields.get(name), str):
            raise DataError(f"{where}: wanted an object with texts or numbers under prediction and answer; see {name}.")
    key, prompt = (str(fields.get(name, default)) for name, default in (("key", f"line-{number}"), ("prompt", "")))
    return Example(key=key, prompt=prompt, answer=fields["answer"]), fields["prediction"]
