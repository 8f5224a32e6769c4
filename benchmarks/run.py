"""`python -m benchmarks.run`: everything that is measured, side by side in one process, and which goals it meets.

    python -m benchmarks.run --only=step,decode --rounds=9
    python -m benchmarks.run --quick                          tiny sizes: proves that it runs, measures nothing

Programs of one table take turns, in reversed order every other round. Columns of packages that are not installed say
so. Results go to one JSON file for each kind of device; copied to docs/results/device_NAME.json, it is a column of
docs/performance.md, which `python -m benchmarks.report` writes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import decode, input_wait, loss_cost, step
from benchmarks.devices import default_path, goal_rows, read_measured, write_measured
from benchmarks.goals import Measured
from benchmarks.report import table, table_of


class Measurement(NamedTuple):
    """A table to measure: (quick, rounds) -> rows and goals."""

    function: Callable[..., Measured]
    title: str


MEASUREMENTS = {
    "loss": Measurement(loss_cost.measure, "losses on given logits and from hidden states"),
    "step": Measurement(step.measure, "a training step"),
    "decode": Measurement(decode.measure, "greedy generation"),
    "input": Measurement(input_wait.measure, "waiting for input"),
}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; a mistake prints the usage and exits with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="measurements, commas between (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of every program (default: 7)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two rounds")
    parser.add_argument("--json", type=Path, help="file of results (default: runs/benchmarks/KIND.json)")
    options = parser.parse_args(arguments)
    options.names = options.only.split(",")
    if unknown := [name for name in options.names if name not in MEASUREMENTS]:
        parser.error(f"--only={options.only}: {', '.join(unknown)} is not known; wanted {', '.join(MEASUREMENTS)}")
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds}: wanted at least 1")
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse_options(arguments)
    path = options.json or default_path()
    try:
        read_measured(path)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    command = " ".join(["python -m benchmarks.run", *arguments])
    for name in options.names:
        function, title = MEASUREMENTS[name]
        print(f"\n{name}: {title}\n", flush=True)
        measured = function(quick=options.quick, rounds=2 if options.quick else options.rounds)
        print(table_of(measured.rows), flush=True)
        write_measured(path, name, measured, command=command, quick=options.quick)
    device = json.loads(path.read_text(encoding="utf-8"))
    print(f"\ngoals\n\n{table(*goal_rows([device]))}")
    print(f"wrote {path}" + ("; a quick run measures nothing" if options.quick else ""))


if __name__ == "__main__":
    main(sys.argv[1:])
