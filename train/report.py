"""What a finished run shows: plots as files, sample predictions and a closing table as text, all from its records."""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.figures import make_figure, save_figure
from train.log import EVALS, METRICS, PREDICTIONS, read_jsonl

Row = Mapping[str, Any]
_ERRORS = {"median error": "median_error", "log MAE": "log_mae", "R2": "r2"}
_GAPS = {"time gap": "time_gap", "without wrap": "time_gap_unwrapped"}
_DISTRIBUTION = {
    "  NLL": "nll",
    "  mass on numbers": "numeric_mass",
    "  expected distance": "expected_distance",
    "  CRPS": "crps",
    "  calibration error": "calibration_error",
}
_MOVING = 12  # most logged steps on each side that the thick line of a loss plot averages over


def write_plots(folder: str | os.PathLike[str]) -> list[Path]:
    """Draw `plots/losses.png`, `plots/accuracy.png` and `plots/error_histogram.png` from a run folder's records.

    A plot without data is left out. The same records give the same bytes.

    Args:
        folder: the run folder.

    Returns:
        The files written.
    """
    folder = Path(folder)
    evals = read_jsonl(folder / EVALS)
    drawings = {
        "losses": draw_losses(read_jsonl(folder / METRICS)),
        "accuracy": draw_accuracy(evals),
        "error_histogram": draw_error_histogram(newest_predictions(folder)),
    }
    written = []
    for name, figure in drawings.items():
        path = folder / "plots" / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(exist_ok=True)
        save_figure(figure, path)
        written.append(path)
    return written


def draw_losses(metrics: Sequence[Row]) -> Any:
    """Return a figure of the total, cross-entropy and numeric loss over steps; None without a row that has one.

    Thin lines are the logged values, thick ones their centred moving mean.
    """
    curves = {name: _points(metrics, name) for name in ("loss", "ce", "numeric")}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    figure, axes = _figure("step", "loss")
    for color, (name, points) in zip(("C0", "C1", "C2"), curves.items(), strict=False):
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) == 1 else None
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8, marker=marker)
        axes.plot(steps, _moving_mean(values), color=color, label=name)
    if all(value > 0 for points in curves.values() for _, value in points):
        axes.set_yscale("log")
    axes.legend(title="thin: logged, thick: moving mean", title_fontsize="small")
    return figure


def draw_accuracy(evals: Sequence[Row]) -> Any:
    """Return a figure of each split's accuracy over steps with its 95 % interval; None without an evaluation."""
    splits = sorted({str(row.get("split")) for row in evals if _is_number(row.get("accuracy"))})
    if not splits:
        return None
    figure, axes = _figure("step", "exact match")
    for split in splits:
        rows = [row for row in evals if str(row.get("split")) == split and _is_number(row.get("accuracy"))]
        steps = [row["step"] for row in rows]
        (line,) = axes.plot(steps, [row["accuracy"] for row in rows], marker="o", label=_plain(split))
        bounds = [row for row in rows if _is_number(row.get("accuracy_low")) and _is_number(row.get("accuracy_high"))]
        low, high = [row["accuracy_low"] for row in bounds], [row["accuracy_high"] for row in bounds]
        axes.fill_between([row["step"] for row in bounds], low, high, color=line.get_color(), alpha=0.2)
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    return figure


def draw_error_histogram(predictions: Sequence[Row]) -> Any:
    """Return a histogram of predicted minus true value, with logarithmic tails; None where no answer was a number."""
    errors = prediction_errors(predictions)
    if not errors:
        return None
    figure, axes = _figure("predicted - true value", "answers")
    heights, *_ = axes.hist(list(map(_symmetric_log, errors)), bins=[edge / 4 - 0.125 for edge in range(-40, 42)])
    reach = max(1.5, max(abs(_symmetric_log(error)) for error in errors) + 0.5)
    ticks = [0, 1, 10, 100, 1000] if reach < 4 else [0, 10, 1000, 10**6, 10**9]
    places = sorted({sign * tick for tick in ticks for sign in (-1, 1)})
    shown = [place for place in places if abs(_symmetric_log(place)) <= reach]
    axes.set_xticks([_symmetric_log(place) for place in shown], [_tick(place) for place in shown])
    axes.set_xlim(-reach, reach)
    axes.set_yscale("symlog", linthresh=1)
    top = 2 * max(heights)
    counts = [0, *(10**power for power in range(10) if 10**power <= top)]
    axes.set_yticks(counts, [f"{count:,}" for count in counts])
    axes.set_ylim(0, top)
    missing = len(predictions) - len(errors)
    axes.set_title(f"{len(errors)} answers that are numbers" + (f", {missing} that are not" if missing else ""))
    return figure


def prediction_errors(predictions: Sequence[Row]) -> list[float]:
    """Return `value - gold_value` of every prediction that holds both as finite numbers."""
    pairs = [(row.get("value"), row.get("gold_value")) for row in predictions]
    return [float(p) - float(a) for p, a in pairs if _is_number(p) and _is_number(a)]


def newest_predictions(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of `predictions/<step>.jsonl` of the largest step; [] where there are none."""
    files = [path for path in (Path(folder) / PREDICTIONS).glob("*.jsonl") if path.stem.isdecimal()]
    return read_jsonl(max(files, key=lambda path: int(path.stem))) if files else []


def sample_predictions(predictions: Sequence[Row], *, limit: int = 5, width: int = 60) -> str:
    """Return the first wrong and the first right predictions as text, wrong ones first; control signs are escaped.

    Example:
        >>> print(sample_predictions([{"prompt": "1+1=", "answer": "2", "prediction": "3", "correct": False}]))
        wrong  1+1=  ->  3  (answer 2)
    """
    lines = []
    for row in choose_rows(predictions, limit=limit):
        prompt, answer, prediction = (_printable(row.get(n), width) for n in ("prompt", "answer", "prediction"))
        end = "" if row.get("correct") else f"  (answer {answer})"
        lines.append(f"{'right' if row.get('correct') else 'wrong'}  {prompt}  ->  {prediction}{end}")
    return "\n".join(lines) or "no predictions"


def choose_rows(predictions: Sequence[Row], *, limit: int) -> list[Row]:
    """Choose the first wrong and the first right predictions, wrong ones first, half of each where there are enough.

    Example:
        >>> rows = [{"key": key, "correct": key > "b"} for key in "abcd"]
        >>> [row["key"] for row in choose_rows(rows, limit=3)]
        ['a', 'b', 'c']
    """
    wrong = [row for row in predictions if not row.get("correct")]
    right = [row for row in predictions if row.get("correct")]
    few = min(len(wrong), max(limit - len(right), (limit + 1) // 2))
    return [*wrong[:few], *right[: limit - few]]


def closing_table(metrics: Sequence[Row], evals: Sequence[Row]) -> str:
    """Return the table a run ends with: the newest evaluation of each split, then how the training went.

    Where answers are times, it has the time gap in minutes too, the shorter way round the dial and without the wrap.

    Example:
        >>> print(closing_table([], [{"step": 5, "split": "easy", "accuracy": 0.5, "n": 10}]))
        split  step  exact match  95 % interval  MAE  median error  log MAE  R2  no number   n
        -----  ----  -----------  -------------  ---  ------------  -------  --  ---------  --
        easy      5       50.0 %              -    -             -        -   -          -  10
    """
    newest = {str(row.get("split")): row for row in sorted(evals, key=lambda row: row["step"])}
    gaps = _GAPS if any(_is_number(row.get("time_gap")) for row in newest.values()) else {}
    names = {"MAE": "mae", **_ERRORS, **gaps, "no number": "parse_failures", "n": "n"}
    cells = [["split", "step", "exact match", "95 % interval", *names]]
    for split, row in newest.items():
        low, high = row.get("accuracy_low"), row.get("accuracy_high")
        interval = f"{100 * low:.1f} - {100 * high:.1f} %" if _is_number(low) and _is_number(high) else "-"
        accuracy = f"{100 * row['accuracy']:.1f} %" if _is_number(row.get("accuracy")) else "-"
        numbers = [_cell(row.get(name)) for name in names.values()]
        cells.append([_printable(split, 40), str(row["step"]), accuracy, interval, *numbers])
    lines = _aligned(cells) if newest else ["no evaluation"]
    if metrics:
        last = metrics[-1]
        losses = ", ".join(f"{name} {_cell(last.get(name))}" for name in ("loss", "ce", "numeric"))
        speeds = [row["tokens_per_second"] for row in metrics if _is_number(row.get("tokens_per_second"))]
        speed = f"; median {statistics.median(speeds):,.0f} tokens/s" if speeds else ""
        lines += ["", f"last logged step {last['step']}: {losses}{speed}"]
    return "\n".join(lines)


def evaluation_table(summary: Row) -> str:
    """Return the table of one evaluation: what was scored, then every metric with its number of pairs and failures.

    Args:
        summary: "inputs", "metrics" as `train.metrics.Metrics`, "distribution" as `DistributionMetrics` or None.
    """
    inputs, metrics = summary["inputs"], summary["metrics"]
    percent = lambda name: f"{100 * metrics[name]:.2f} %" if _is_number(metrics.get(name)) else "-"
    lines = [
        *((name, _printable(value, 80)) for name, value in inputs.items() if value is not None),
        ("accuracy", f"{percent('accuracy')} of {metrics['n']:,} predictions"),
        ("95 % interval", f"{percent('accuracy_low')} to {percent('accuracy_high')}"),
        ("parse failures", f"{metrics['parse_failures']:,} ({percent('parse_failure_rate')}) state no number"),
        ("MAE", f"{_cell(metrics.get('mae'))} over {metrics['pairs']:,} pairs of numbers"),
        *((label, _cell(metrics.get(name))) for label, name in _ERRORS.items()),
    ]
    if _is_number(metrics.get("time_gap")):
        lines += [(label, f"{_cell(metrics.get(name))} minutes") for label, name in _GAPS.items()]
    if (distribution := summary.get("distribution")) is not None:
        lines += [("numeric targets", f"{distribution['n']:,} tokens of gold answers")]
        lines += [(label, _cell(distribution.get(name))) for label, name in _DISTRIBUTION.items()]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def _figure(x_label: str, y_label: str) -> tuple[Any, Any]:
    figure, ((axes,),) = make_figure((6.4, 4.0))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes


def _points(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    return [(row["step"], float(row[name])) for row in rows if _is_number(row.get(name))]


def _moving_mean(values: Sequence[float]) -> list[float]:
    """Average over the same number of neighbours on both sides, fewer near the ends: a one-sided mean lags behind.

    Early on a loss falls so steeply that the mean of a wide window lies far above its middle, so it widens with the
    step: a quarter of the way from the beginning on each side.
    """
    sides = [min(_MOVING, i // 4, len(values) - 1 - i) for i in range(len(values))]
    return [statistics.fmean(values[i - side : i + side + 1]) for i, side in enumerate(sides)]


def _tick(place: int) -> str:
    """Write 1000000 as 1e6: all its digits would run into the next tick's."""
    return str(place) if abs(place) <= 1000 else f"{'-' if place < 0 else ''}1e{len(str(abs(place))) - 1}"


def _symmetric_log(value: float) -> float:
    """Map a value to sign(x) log10(1 + |x|), within the histogram's edges of +-10."""
    return math.copysign(min(math.log10(1 + abs(value)), 10.0), value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _cell(value: Any) -> str:
    if not _is_number(value):
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *rest = rows
    rows = [first, ["-" * width for width in widths], *rest]
    lines = []
    for row in rows:
        left, *numbers = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([left, *(cell.strip().rjust(len(cell)) for cell in numbers)]))
    return lines


def _printable(value: Any, width: int) -> str:
    """Escape what a terminal would obey or could not show, and say how much of a long text was left out."""
    text = ascii(str(value))[1:-1].replace("\\'", "'")
    return text if len(text) <= width else f"{text[:width]}... ({len(text) - width} more)"


def _plain(text: str) -> str:
    """Keep matplotlib from reading `$` as the start of a formula, and a leading underscore as a hidden label."""
    return " " + text.replace("$", r"\$") if text.startswith("_") else text.replace("$", r"\$")
