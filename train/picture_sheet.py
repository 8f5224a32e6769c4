"""A sheet of pictures with what a model answered to each: `plots/TASK_examples.png` of a run on data with pictures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.figures import make_figure, save_figure
from train.image_files import ImageError, read_image
from train.report import choose_rows, newest_predictions
from train.tasks.base import Example

_COLUMNS, _LIMIT = 6, 24
_WIDTH = 24  # letters of an answer that a picture has room for
_RIGHT, _WRONG = "#1a7f37", "#c62828"

Row = Mapping[str, Any]


def write_picture_sheet(folder: Path, task: str, examples: Iterable[Example]) -> Path | None:
    """Draw the newest predictions of a run with their pictures; the same records give the same bytes.

    Args:
      folder: the run folder.
      task: names the file, ``plots/TASK_examples.png``.
      examples: those that were answered, in any order; the ones without a picture, or that nobody answered, are passed
        over.

    Returns:
      The file; None, and an older one is removed, where no prediction has a picture.
    """
    path = folder / "plots" / f"{task}_examples.png"
    pictures = {example.key: example.image for example in examples if example.image is not None}
    figure = draw_picture_sheet(newest_predictions(folder) if pictures else [], pictures)
    if figure is None:
        path.unlink(missing_ok=True)
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
    return path


def draw_picture_sheet(predictions: Sequence[Row], pictures: Mapping[str, bytes]) -> Any:
    """Return a grid of pictures, each below its answer: green where it is right, else red with the true one behind it.

    Args:
      predictions: rows of ``predictions/<step>.jsonl``.
      pictures: key of a prediction -> its picture, encoded.
    """
    rows = choose_rows([row for row in predictions if row.get("key") in pictures], limit=_LIMIT)
    if not rows:
        return None
    lines = math.ceil(len(rows) / _COLUMNS)
    figure, grid = make_figure((1.5 * _COLUMNS, 1.75 * lines), lines, _COLUMNS)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, row in zip(grid.flat, rows, strict=False):
        axes.imshow(_pixels(pictures[row["key"]]), interpolation="nearest")
        axes.set_title(caption(row), fontsize=9, color=_RIGHT if row.get("correct") else _WRONG)
    return figure


def caption(row: Row) -> str:
    """Say what was predicted, and where that is wrong what was true.

    Example:
      >>> caption({"prediction": "9:05", "answer": "9:10", "correct": False})
      '9:05 (true 9:10)'
    """
    prediction, answer = (_short(row.get(name, "")) for name in ("prediction", "answer"))
    return prediction if row.get("correct") else f"{prediction} (true {answer})"


def _short(value: Any) -> str:
    """On one line, without what fonts lack, and without `$`, which starts a formula."""
    text = "".join(letter if letter.isprintable() and letter.isascii() else "?" for letter in str(value))
    text = text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
    return text.replace("$", r"\$")


def _pixels(data: bytes) -> np.ndarray:
    try:
        return np.asarray(read_image(data))
    except ImageError:  # a file that was changed since it was answered
        return np.full((8, 8, 3), 200, np.uint8)
