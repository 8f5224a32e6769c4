"""`python -m train.inspect_data --task=arith --backbone=tiny`: see what a run would learn from, before it runs."""

import dataclasses
import sys
import typing
from collections.abc import Sequence

from train.config import DATA_OPTIONS, TrainConfig, make_config
from train.exits import DataError, run_guarded
from train.flags import check_values, flag_field, parse_flags
from train.main import TABLES

USAGE = "usage: python -m train.inspect_data --task=TASK [--backbone=NAME] [--flag=value ...]"
OWN_FLAGS = {
    "examples": flag_field("Training examples to show, with a mark for every token", 3, at_least=0),
    "check_overlap": flag_field("Refuse data whose evaluation split shares a question with the training split", False),
    "out": flag_field("Folder for report.txt, lengths.png and kernel.png; empty: the report is printed only", ""),
}
SHARED = ("task", "backbone", "variant", "data_dir", *DATA_OPTIONS, "eval_split", "max_length", "max_dropped_fraction")
SHARED += ("numeric_policy", "kernel", "sigma", "alpha", "rescale", "seed", "debug")


def make_flags() -> type:
    """Make the flags of the command: its own, and those of `train.main` that decide what is learnt from."""
    kinds = typing.get_type_hints(TrainConfig)
    shared = {field.name: field for field in dataclasses.fields(TrainConfig)}
    copy = lambda field: dataclasses.field(default=field.default, metadata=field.metadata)
    rows = [(name, kinds[name], copy(shared[name])) for name in SHARED]
    rows += [(name, type(field.default), copy(field)) for name, field in OWN_FLAGS.items()]
    return dataclasses.make_dataclass("InspectFlags", rows, frozen=True, kw_only=True)


def main(argv: Sequence[str]) -> None:
    kind = make_flags()
    tables = {name: table for name, table in TABLES.items() if name in SHARED}
    given = parse_flags(kind, argv, tables=tables, usage=USAGE)
    config = make_config({name: value for name, value in given.items() if name not in OWN_FLAGS}, tables=TABLES)
    own = kind(**{"task": config.task, **{name: value for name, value in given.items() if name in OWN_FLAGS}})
    check_values(own)
    from train.inspection import inspect, write_inspection

    found = inspect(config, examples=own.examples, check_overlap=own.check_overlap)
    print(found.text)
    for path in write_inspection(found, own.out) if own.out else ():
        print(f"wrote {path}")
    if found.faults:
        # The report has just ended with them; here their kinds, for a reader of stderr alone.
        kinds = dict.fromkeys(fault.partition(":")[0] for fault in found.faults)
        raise DataError(f"the data are not fit to train on: {'; '.join(kinds)}. The report says more under 'faults'.")


if __name__ == "__main__":
    run_guarded(main, sys.argv)
