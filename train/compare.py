"""`python -m train.compare --task=arith --losses=ce,smmd --seeds=0,1,2`: a resumable grid of runs and its table."""

import dataclasses
import os
import sys
import typing
from collections.abc import Sequence

from smmd_jax import LOSSES
from train.aggregate import write_comparison
from train.config import TrainConfig
from train.exits import StopSignals, run_guarded
from train.flags import flag_field, parse_flags
from train.grid import check_cells, launch_process, make_cells, raise_for_failures, read_names, read_seeds, run_cells
from train.main import TABLES

USAGE = "usage: python -m train.compare --task=TASK --losses=ce,smmd --seeds=0,1,2 [--flag=value ...]"
OWN_FLAGS = {
    "losses": flag_field(f"Losses, commas between: {', '.join(LOSSES)}, package.module:function", "ce,smmd"),
    "seeds": flag_field("Seeds, commas between; every loss is trained with each of them", "0,1,2"),
    "workdir": flag_field("Folder of the grid, a run folder for each cell; empty: runs/compare-TASK", ""),
    "report_only": flag_field("Write the table of what is there; run nothing", False),
}
LEFT_OUT = {*OWN_FLAGS, "loss", "seed", "print_config", "dry_run"}


def make_flags() -> type:
    """Make the flags of the command: its own, and those of `train.main` that all cells share."""
    kinds = typing.get_type_hints(TrainConfig)
    shared = {field.name: field for field in dataclasses.fields(TrainConfig) if field.name not in LEFT_OUT}
    fields = {"task": shared.pop("task"), **OWN_FLAGS, **shared}
    kinds |= {name: type(field.default) for name, field in OWN_FLAGS.items()}
    copy = lambda field: dataclasses.field(default=field.default, metadata=field.metadata)
    rows = [(name, kinds[name], copy(field)) for name, field in fields.items()]
    return dataclasses.make_dataclass("CompareFlags", rows, frozen=True, kw_only=True)


def main(argv: Sequence[str]) -> None:
    given = parse_flags(make_flags(), argv, tables=TABLES, usage=USAGE)
    own = {name: given.pop(name, field.default) for name, field in OWN_FLAGS.items()}
    folder = own["workdir"] or os.path.join("runs", f"compare-{given.get('task', '')}")
    losses, seeds = read_names(own["losses"]), read_seeds(own["seeds"])
    cells = make_cells(given, losses=losses, seeds=seeds, workdir=folder, tables=TABLES)
    check_cells(cells, report_only=own["report_only"])
    report = lambda: write_comparison(cells, folder, argv)
    if not own["report_only"]:
        with StopSignals() as stop:
            run_cells(cells, launch=launch_process, stop=stop, report=report)
    print(report(), end="")
    raise_for_failures(cells, report_only=own["report_only"])


if __name__ == "__main__":
    run_guarded(main, sys.argv)
