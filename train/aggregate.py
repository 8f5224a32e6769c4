"""The table of a grid of runs: mean and deviation over seeds, paired differences to plain cross entropy, Markdown."""

import json
import os
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.environment import redact
from train.exits import StorageError
from train.files import replace_file
from train.grid import Cell, Outcome, describe, read_outcome

# name of a metric -> heading, factor, decimals
COLUMNS = {
    "accuracy": ("accuracy, %", 100.0, 2),
    "mae": ("MAE", 1.0, 3),
    "median_error": ("median error", 1.0, 2),
    "time_gap": ("time gap", 1.0, 2),
    "r2": ("R2", 1.0, 4),
    "parse_failures": ("no number", 1.0, 1),
    "minutes": ("minutes", 1.0, 1),
}
COMPARED = {"accuracy": "accuracy, points", "mae": "MAE", "time_gap": "time gap"}
_OF_TIMES = ("time_gap",)  # shown where the answers are times
BASELINE = "ce"
_RESAMPLES = 10_000


def write_comparison(cells: Sequence[Cell], folder: str | os.PathLike[str], argv: Sequence[str]) -> str:
    """Write `compare.json` and `compare.md` of a grid as far as it has got; returns the Markdown.

    Args:
      cells: the grid.
      folder: where the files go.
      argv: the command line, program first.

    Raises:
      StorageError: the folder cannot be written.
    """
    flags = [redact(flag) for flag in argv[1:] if not flag.lstrip("-").startswith("report_only")]
    command = shlex.join(["python", "-m", "train.compare", *flags])
    result = comparison(cells, [read_outcome(cell) for cell in cells], command=command)
    text = to_markdown(result)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        replace_file(Path(folder) / "compare.json", json.dumps(result, indent=1, allow_nan=False) + "\n")
        replace_file(Path(folder) / "compare.md", text)
    except OSError as error:
        raise StorageError(f"cannot write the comparison: {error}. Choose another --workdir.") from error
    return text


def comparison(cells: Sequence[Cell], outcomes: Sequence[Outcome], *, command: str) -> dict[str, Any]:
    """Collect a grid into one JSON object: every cell, means over seeds, paired differences to cross entropy.

    Only finished cells enter a mean or a difference; the others stay in the list of cells with what ended them.

    Args:
      cells: the grid.
      outcomes: of each cell.
      command: the line that makes this comparison.
    """
    rows = [_cell_row(cell, outcome) for cell, outcome in zip(cells, outcomes, strict=True)]
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    config = cells[0].config
    return {
        "command": command,
        "task": config.task,
        "backbone": config.backbone,
        "split": config.eval_split,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "examples": sorted({row["metrics"]["n"] for row in rows if row["metrics"]}),
        "summary": {loss: _summary([row for row in rows if row["loss"] == loss]) for loss in losses},
        "differences": {
            loss: {name: paired_difference(*(_by_seed(rows, which, name) for which in (BASELINE, loss)))
                   for name in COMPARED}
            for loss in losses if BASELINE in losses and loss != BASELINE
        },
        "cells": rows,
    }  # fmt: skip


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Give the mean and the standard deviation (n - 1) of values; None where there are too few of them.

    Example:
        >>> mean_and_deviation([1.0, 2.0, 3.0]), mean_and_deviation([4.0]), mean_and_deviation([])
        ((2.0, 1.0), (4.0, None), (None, None))
    """
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def paired_difference(
    baseline: Mapping[int, float | None], other: Mapping[int, float | None]
) -> dict[str, Any]:
    """Give the mean over seeds of other - baseline, and its 95 % percentile bootstrap interval over those seeds.

    With few seeds the interval is little more than the range of the differences: it says so by its n.

    Args:
      baseline, other: seed -> value; a seed counts where both have one.

    Returns:
      mean, low, high (None below two seeds), n, seeds.

    Example:
        >>> paired_difference({0: 1.0, 1: 2.0}, {0: 2.0, 1: 5.0, 2: 9.0})
        {'mean': 2.0, 'low': 1.0, 'high': 3.0, 'n': 2, 'seeds': [0, 1]}

    References:
        Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3 (percentile interval).
    """
    seeds = [seed for seed in baseline if baseline[seed] is not None and other.get(seed) is not None]
    values = np.array([other[seed] - baseline[seed] for seed in seeds])
    low = high = None
    if len(seeds) > 1:
        draws = np.random.default_rng(0).integers(len(seeds), size=(_RESAMPLES, len(seeds)))
        low, high = (float(bound) for bound in np.quantile(values[draws].mean(1), [0.025, 0.975]))
    mean = float(values.mean()) if seeds else None
    return {"mean": mean, "low": low, "high": high, "n": len(seeds), "seeds": seeds}


def to_markdown(result: Mapping[str, Any]) -> str:
    """Write what `comparison` collected as Markdown tables, with the command and the machine."""
    examples = " or ".join(f"{n:,}" for n in result["examples"]) or "no"
    lines = [
        f"Task {result['task']}, split {result['split']} ({examples} examples), backbone {result['backbone']}, "
        f"{result['steps']:,} steps of {result['batch_size']} rows. Mean ± standard deviation (n - 1) over seeds; "
        "minutes are those of the whole process.",
        "",
        *_table(summary_head(result), summary_rows(result)),
    ]
    if result["differences"]:
        lines += [
            "",
            f"Difference to {BASELINE} with the same seed: mean [95 % bootstrap interval over n seeds].",
            "",
            *_table(
                [f"loss - {BASELINE}", "n", *(COMPARED[name] for name in _shown(result, COMPARED))],
                _difference_rows(result),
            ),
        ]
    left = [row for row in result["cells"] if row["state"] != "finished"]
    if left:
        lines += ["", "Not in any mean:", ""]
        lines += [f"- {row['loss']} seed {row['seed']}: {row['ending']}" for row in left]
    lines += ["", f"Command: `{result['command']}`", "", *_machines(result)]
    return "\n".join(lines) + "\n"


def summary_head(result: Mapping[str, Any]) -> list[str]:
    """Give the head of the table of means: loss, seeds, and the columns that a result has."""
    return ["loss", "seeds", *(COLUMNS[name][0] for name in _shown(result, COLUMNS))]


def summary_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Give the cells of the table of means, as `summary_head` names them."""
    rows = []
    for loss, summary in result["summary"].items():
        cells = [_mean_text(summary["metrics"][name], *COLUMNS[name][1:]) for name in _shown(result, COLUMNS)]
        rows.append([loss, str(summary["n"]), *cells])
    return rows


def _difference_rows(result: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for loss, by_metric in result["differences"].items():
        n = next(iter(by_metric.values()))["n"]
        names = _shown(result, COMPARED)
        rows.append([loss, str(n), *(_difference_text(by_metric[name], *COLUMNS[name][1:]) for name in names)])
    return rows


def _shown(result: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Leave out what only times have where no answer is a time, and where the result is older than the column."""
    metrics = [summary["metrics"] for summary in result["summary"].values()]
    has = lambda name: any(part.get(name, {}).get("mean") is not None for part in metrics)
    return [name for name in names if name not in _OF_TIMES or has(name)]


def _cell_row(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    metrics = None if outcome.metrics is None else dict(outcome.metrics)
    facts = dict(outcome.environment)
    return {
        "loss": cell.config.loss,
        "seed": cell.config.seed,
        "state": outcome.state,
        "ending": describe(outcome),
        "exit_code": outcome.exit_code,
        "seconds": outcome.seconds,
        "metrics": metrics,
        "command": cell.command,
        "config": {name: value for name, value in vars(cell.config).items() if name != "data_dir"},
        "git": facts.pop("git", None),
        "versions": facts.pop("versions", None),
        "machine": facts,
    }


def _value(row: Mapping[str, Any], name: str) -> float | None:
    if name == "minutes":
        return None if row["seconds"] is None else row["seconds"] / 60
    return row["metrics"].get(name)


def _by_seed(rows: Sequence[Mapping[str, Any]], loss: str, name: str) -> dict[int, float | None]:
    return {row["seed"]: _value(row, name) for row in rows if row["loss"] == loss and row["state"] == "finished"}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    finished = [row for row in rows if row["state"] == "finished"]
    metrics = {}
    for name in COLUMNS:
        values = [_value(row, name) for row in finished]
        # A mean over those seeds that happen to have a value would compare different things.
        mean, deviation = (None, None) if None in values else mean_and_deviation(values)
        metrics[name] = {"mean": mean, "deviation": deviation}
    return {"n": len(finished), "metrics": metrics}


def _mean_text(part: Mapping[str, Any], factor: float, decimals: int) -> str:
    if part["mean"] is None:
        return "-"
    text = f"{part['mean'] * factor:.{decimals}f}"
    return text if part["deviation"] is None else f"{text} ± {part['deviation'] * factor:.{decimals}f}"


def _difference_text(part: Mapping[str, Any], factor: float, decimals: int) -> str:
    if part["mean"] is None:
        return "-"
    mean, low, high = (None if part[key] is None else f"{part[key] * factor:+.{decimals}f}"
                       for key in ("mean", "low", "high"))  # fmt: skip
    return mean if low is None else f"{mean} [{low}, {high}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    ruler = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(row)} |" for row in (head, ruler, *rows)]


def _machines(result: Mapping[str, Any]) -> list[str]:
    """One line for each kind of machine and set of versions that a finished cell ran on."""
    lines = []
    for row in result["cells"]:
        machine, versions = row["machine"], row["versions"]
        if row["state"] != "finished" or not machine or not versions:
            continue
        named = ", ".join(f"{name} {versions[name]}" for name in ("python", "jax", "flax", "optax") if versions[name])
        lines.append(
            f"Machine: {machine['system']}, {machine['cpu_count']} processors, {machine['device_count']} x "
            f"{machine['device_kind']}; {named}."
        )
    return list(dict.fromkeys(lines))
