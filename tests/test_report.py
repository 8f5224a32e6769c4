"""Plots and texts of a finished run: from few rows, nulls and hostile text; the same records give the same bytes."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from train.log import write_jsonl
from train.report import (
    closing_table,
    draw_accuracy,
    draw_error_histogram,
    draw_losses,
    newest_predictions,
    prediction_errors,
    sample_predictions,
    write_plots,
)

METRICS = [
    {"step": step, "loss": 3.0 / step, "ce": 2.0 / step, "numeric": 0.3 / step, "tokens_per_second": 100.0 * step}
    for step in range(1, 41)
]
EVALS = [
    {
        "step": step, "split": split, "accuracy": accuracy, "accuracy_low": accuracy - 0.1,
        "accuracy_high": accuracy + 0.1, "mae": 1.25, "median_error": 0.0, "log_mae": 0.1, "r2": 0.99,
        "parse_failures": 2, "n": 200,
    }
    for step, split, accuracy in [(20, "interpolate", 0.5), (40, "interpolate", 0.905), (40, "longer", 0.2)]
]  # fmt: skip
PREDICTIONS = [
    {
        "key": key, "prompt": f"{prompt} = ", "answer": str(gold), "prediction": prediction,
        "correct": prediction == str(gold), "value": value, "gold_value": gold,
    }
    for key, prompt, gold, prediction, value in [
        ("0", "1 + 2", 3, "3", 3), ("1", "5 - 9", -4, "4", 4.0), ("2", "7", 7, "x", None), ("3", "0", 0, "1e30", 1e30)
    ]
]  # fmt: skip


def make_run(folder, metrics=METRICS, evals=EVALS, predictions=PREDICTIONS):
    write_jsonl(folder / "metrics.jsonl", metrics)
    write_jsonl(folder / "eval.jsonl", evals)
    write_jsonl(folder / "predictions" / "5.jsonl", [{"prompt": "old"}])
    write_jsonl(folder / "predictions" / "40.jsonl", predictions)
    return folder


def size_of(path):
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack(">II", content[16:24])


def test_a_run_gets_three_plots_and_the_same_records_give_the_same_bytes(tmp_path):
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    paths = write_plots(first)
    assert [path.name for path in paths] == ["losses.png", "accuracy.png", "error_histogram.png"]
    assert all(size_of(path) == (768, 480) for path in paths)
    for path in write_plots(second):
        assert path.read_bytes() == (first / "plots" / path.name).read_bytes()


def test_plots_without_data_are_left_out_and_removed_when_they_are_old(tmp_path):
    assert write_plots(tmp_path) == []
    make_run(tmp_path)
    write_plots(tmp_path)
    make_run(tmp_path, evals=[], predictions=[])
    assert [path.name for path in write_plots(tmp_path)] == ["losses.png"]
    assert os.listdir(tmp_path / "plots") == ["losses.png"]


@pytest.mark.parametrize(
    "metrics, curves",
    [
        ([{"step": 1, "loss": 2.0, "ce": 2.0, "numeric": None}], ["loss", "ce"]),
        ([{"step": 1, "loss": None, "nonfinite": {"loss": "nan"}}, {"step": 2, "loss": 1.0}], ["loss"]),
        ([{"step": 1, "loss": 1.0, "numeric": 0.0}, {"step": 2, "loss": 0.5, "numeric": 0.1}], ["loss", "numeric"]),
    ],
)
def test_loss_curves_leave_nulls_out(metrics, curves):
    (axes,) = draw_losses(metrics).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == curves
    assert draw_losses([{"step": 1, "loss": None}]) is None


@pytest.mark.parametrize("name, value", [("power", lambda step: 20 / step), ("flat", lambda step: 2.0)])
def test_the_thick_line_follows_a_falling_loss_and_says_what_it_is(name, value):
    """Within 5 %, from the first row to the last: a wide window shows the steep beginning where it has long passed."""
    steps = range(20, 2001, 20)
    (axes,) = draw_losses([{"step": step, "loss": value(step)} for step in steps]).axes
    thin, thick = axes.get_lines()
    assert list(thick.get_xdata()) == list(steps)
    assert max(abs(thick.get_ydata() / thin.get_ydata() - 1)) < 0.05
    assert axes.get_legend().get_title().get_text() == "thin: logged, thick: moving mean"


def test_the_thick_line_is_smoother_than_the_thin_one():
    (axes,) = draw_losses([{"step": step, "loss": 2.0 + step % 2} for step in range(200)]).axes
    assert max(abs(value - 2.5) for value in axes.get_lines()[1].get_ydata()[60:-20]) < 0.05


def test_the_tallest_bar_of_errors_has_room_above_and_ticks_are_plain_numbers():
    exact = [{"value": 3, "gold_value": 3}] * 945
    (axes,) = draw_error_histogram([*exact, {"value": 4, "gold_value": 3}]).axes
    assert axes.get_ylim() == (0, 2 * 945)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0", "1", "10", "100", "1,000"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["-10", "-1", "0", "1", "10"]
    (axes,) = draw_error_histogram(PREDICTIONS).axes
    assert [text.get_text() for text in axes.get_xticklabels()][-3:] == ["1000", "1e6", "1e9"]


def test_accuracy_has_a_line_per_split_in_the_order_of_their_names(tmp_path):
    odd = {"step": 3, "split": "_$x^$", "accuracy": 0.1}
    (axes,) = draw_accuracy([*EVALS, odd]).axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == [r" _\$x^\$", "interpolate", "longer"]
    assert draw_accuracy([{"step": 1, "split": "a", "accuracy": None}]) is None
    make_run(tmp_path, evals=[odd])
    write_plots(tmp_path)  # a formula sign in a name must not break the drawing


def test_errors_are_those_of_pairs_of_numbers():
    assert prediction_errors(PREDICTIONS) == [0.0, 8.0, 1e30]
    assert prediction_errors([{"value": True, "gold_value": 1}]) == []
    (axes,) = draw_error_histogram(PREDICTIONS).axes
    assert sum(patch.get_height() for patch in axes.patches) == 3  # 1e30 is in the last bar, not lost
    assert axes.get_title() == "3 answers that are numbers, 1 that are not"
    assert draw_error_histogram([{"prediction": "x"}]) is None


def test_the_newest_predictions_are_those_of_the_largest_step(tmp_path):
    assert newest_predictions(tmp_path) == []
    assert newest_predictions(make_run(tmp_path)) == PREDICTIONS


def test_samples_show_wrong_ones_first_and_both_kinds():
    lines = sample_predictions(PREDICTIONS, limit=3).splitlines()
    assert lines[0] == "wrong  5 - 9 =   ->  4  (answer -4)"
    assert [line.split()[0] for line in lines] == ["wrong", "wrong", "right"]
    assert sample_predictions([PREDICTIONS[0]] * 9, limit=4).count("right") == 4
    assert sample_predictions([PREDICTIONS[1]] * 9, limit=4).count("wrong") == 4
    assert sample_predictions([]) == "no predictions"


def test_samples_escape_what_a_terminal_would_obey_and_say_what_they_cut():
    row = {"prompt": "a\n\x1b[31m\u202e$", "answer": "é", "prediction": "9" * 100, "correct": False}
    text = sample_predictions([row], width=10)
    assert text.isascii() and text.isprintable()
    assert r"a\n\x1b[31" in text and "9999999999... (90 more)" in text and r"\xe9" in text


def test_the_closing_table_shows_the_newest_row_of_each_split():
    lines = closing_table(METRICS, EVALS).splitlines()
    assert " ".join(lines[2].split()) == "interpolate 40 90.5 % 80.5 - 100.5 % 1.25 0 0.1 0.99 2 200"
    assert lines[3].startswith("longer") and len(lines) == 6
    assert lines[5] == "last logged step 40: loss 0.075, ce 0.05, numeric 0.0075; median 2,050 tokens/s"
    assert len({len(line) for line in lines[:4]}) == 1


def test_the_closing_table_of_a_run_that_was_never_evaluated():
    assert closing_table([{"step": 1, "loss": None, "ce": 2.0}], []) == (
        "no evaluation\n\nlast logged step 1: loss -, ce 2, numeric -"
    )


def test_reading_records_loads_no_matplotlib():
    code = "import sys, train.report as r; r.closing_table([], []); print('matplotlib' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_the_closing_table_of_times_has_the_gap_both_ways():
    row = {**EVALS[0], "time_gap": 12.5, "time_gap_unwrapped": 80.0}
    head, _, line = closing_table([], [row, {**EVALS[2], "time_gap": None}]).splitlines()[:3]
    assert head.split("  ")[-1] == "n" and "R2  time gap  without wrap  no number" in head
    assert line.split()[-4:] == ["12.5", "80", "2", "200"]
    assert "time gap" not in closing_table([], EVALS)
