"""`python -m train.evaluate --workdir=RUN --task=svamp`: score a run, a model folder or a file of predictions."""

import sys
from collections.abc import Sequence

from train.evaluation import EvaluateFlags, evaluate
from train.exits import run_guarded
from train.flags import check_names, parse_flags
from train.graders import GRADERS
from train.report import evaluation_table
from train.tasks import TASKS

USAGE = "usage: python -m train.evaluate --workdir=RUN --task=TASK [--flag=value ...]"
TABLES = {"task": TASKS, "grader": GRADERS}


def main(argv: Sequence[str]) -> None:
    given = parse_flags(EvaluateFlags, argv, tables=TABLES, usage=USAGE, task_defaults=False)
    tables = {name: table for name, table in TABLES.items() if given.get(name)}
    check_names(given, EvaluateFlags, tables=tables)
    path, summary = evaluate(EvaluateFlags(**given))
    print(evaluation_table(summary))
    for note in summary["notes"]:
        print(f"note: {note}")
    print(f"one line for each prediction: {path}" if path else "nothing was written: --out=FOLDER keeps the grades")


if __name__ == "__main__":
    run_guarded(main, sys.argv)
