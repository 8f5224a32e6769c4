"""Where the rows and the progress of a run go: to its folder and the terminal, from one process alone."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.log import EVALS, METRICS, JsonlWriter, TensorBoardWriter, drop_later_predictions
from train.processes import is_primary
from train.progress import Progress


@dataclasses.dataclass(kw_only=True)
class Records:
    """Where rows and progress go; without writers where another process writes."""

    metrics: JsonlWriter | None
    evals: JsonlWriter | None
    progress: Progress
    tensorboard: TensorBoardWriter | None = None

    def write(self, writer: JsonlWriter | None, row: dict[str, Any], prefix: str) -> None:
        if writer is None:
            return
        writer.write(row)
        if self.tensorboard is not None:
            self.tensorboard.write(row, prefix=prefix)


def open_records(stack: contextlib.ExitStack, config: TrainConfig, resume_step: int | None, *, initial: int) -> Records:
    """Open the records of a run folder where this process writes them, and silent ones where another does.

    Args:
      stack: closes them.
      config: of the run.
      resume_step: the step that the run goes on from; rows of later ones are dropped. None: all of them.
      initial: steps done before this start.
    """
    if not is_primary():
        silent = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        progress = stack.enter_context(Progress(config.steps, initial=initial, stream=silent))
        return Records(metrics=None, evals=None, progress=progress)
    folder = Path(config.workdir)
    drop_later_predictions(folder, resume_step)
    records = Records(
        metrics=stack.enter_context(JsonlWriter(folder / METRICS, resume_step=resume_step)),
        evals=stack.enter_context(JsonlWriter(folder / EVALS, resume_step=resume_step, key=("step", "split"))),
        progress=stack.enter_context(Progress(config.steps, initial=initial)),
    )
    if config.tensorboard:
        records.tensorboard = TensorBoardWriter(folder / "tensorboard", resume_step=resume_step)
        stack.callback(records.tensorboard.close)
    return records
