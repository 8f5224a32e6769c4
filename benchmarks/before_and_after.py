"""`python -m benchmarks.before_and_after GRID --json=FILE`: every evaluation of the runs of a grid, first to last.

GRID is the run folder of `train.compare`; a run from pretrained weights is evaluated before its first step too.
"""

import argparse
import json
from pathlib import Path

from benchmarks.timing import write_rows
from train.log import read_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", type=Path, help="run folder of train.compare")
    parser.add_argument("--json", type=Path, required=True, help="write rows, command, machine and versions here")
    options = parser.parse_args()
    compared = json.loads((options.grid / "compare.json").read_text(encoding="utf-8"))
    rows, cells = [], [cell for cell in compared["cells"] if cell["state"] == "finished"]
    for cell in cells:
        for found in read_jsonl(options.grid / f"{cell['loss']}-seed{cell['seed']}" / "eval.jsonl"):
            rows.append(
                {
                    "loss": cell["loss"],
                    "seed": cell["seed"],
                    "optimizer steps": found["step"],
                    "accuracy, %": 100 * found["accuracy"],
                    "95 % interval": f"{100 * found['accuracy_low']:.1f} to {100 * found['accuracy_high']:.1f}",
                    **{name: found[name] for name in ("mae", "median_error", "r2", "parse_failures", "n")},
                }
            )
    write_rows(options.json, compared["command"], rows, cells[0]["versions"])


if __name__ == "__main__":
    main()
