"""Charts of our own: the picture shows the table, and every answer is worked out again from question and table."""

import csv
import dataclasses
import io
import random
import re

import numpy as np
import pytest

from train.tasks.chart import Chart, draw_chart, paint_chart
from train.tasks.chart_questions import KINDS, ask_questions

CHARTS = [draw_chart(random.Random(seed)) for seed in range(300)]
GREEN, RED, BLUE = (0, 160, 0), (200, 0, 0), (0, 0, 200)
BARS = Chart(
    kind="bar", labels=("A", "B", "C"), values=(2, 10, 5), scale=10, printed=False, colours=(GREEN, RED, BLUE),
    background=(255, 255, 255), grid=False,
)  # fmt: skip


def rows_of(chart):
    return {row["label"]: int(row["value"]) for row in csv.DictReader(io.StringIO(chart.table()))}


def answer(question, rows):
    """The answer once more, from the words of the question and the table alone."""
    values = sorted(rows.values())
    if match := re.fullmatch(r"Value of ([A-H])\?", question):
        return str(rows[match[1]])
    if match := re.fullmatch(r"([A-H]) (plus|minus) ([A-H])\?", question):
        return str(rows[match[1]] + (rows[match[3]] if match[2] == "plus" else -rows[match[3]]))
    if match := re.fullmatch(r"How many above ([0-9]+)\?", question):
        return str(len([value for value in values if value > int(match[1])]))
    if question in ("How many bars?", "How many points?", "How many slices?"):
        return str(len(rows))
    if question in ("Largest?", "Smallest?"):
        return next(label for label, value in rows.items() if value == values[-1 if question == "Largest?" else 0])
    return str({"Highest value?": values[-1], "Lowest value?": values[0]}[question])


def test_every_answer_is_that_of_the_table():
    seen = set()
    for seed, chart in enumerate(CHARTS):
        for question, given in ask_questions(chart, random.Random(seed), len(KINDS)):
            assert answer(question, rows_of(chart)) == given, (question, chart)
            seen.add(re.sub(r"\b[A-H]\b|[0-9]+", "x", question))
    parts = {f"How many {part}?" for part in ("bars", "points", "slices", "above x")}
    words = {f"{word}?" for word in ("Largest", "Smallest", "Highest value", "Lowest value")}
    assert seen == {"Value of x?", "x plus x?", "x minus x?"} | parts | words


def test_charts_hold_what_is_promised():
    assert {chart.kind for chart in CHARTS} == {"bar", "line", "pie"}
    for chart in CHARTS:
        assert len(set(chart.values)) == len(chart.values) == len(chart.labels) == len(chart.colours)
        assert all(0 < value <= chart.scale for value in chart.values)
        assert chart.kind != "pie" or (sum(chart.values) == 100 and len(set(chart.colours)) == len(chart.colours))
    assert {chart.printed for chart in CHARTS} == {chart.grid for chart in CHARTS} == {True, False}
    assert len({paint_chart(chart, 64).tobytes() for chart in CHARTS[:100]}) == 100


def test_the_bars_are_as_high_as_their_values():
    pixels = np.asarray(paint_chart(BARS, 200)).astype(int)
    heights = [(np.abs(pixels - colour).sum(-1) < 60).any(1).sum() for colour in (GREEN, RED, BLUE)]
    full = heights[1]
    assert abs(heights[0] - full / 5) <= 2 and abs(heights[2] - full / 2) <= 2 and full > 140


def test_the_slices_are_as_large_as_their_shares():
    pie = dataclasses.replace(BARS, kind="pie", values=(20, 50, 30), scale=100)
    pixels = np.asarray(paint_chart(pie, 200)).astype(int)
    areas = np.array([(np.abs(pixels - colour).sum(-1) < 60).sum() for colour in (GREEN, RED, BLUE)])
    assert np.abs(areas / areas.sum() - [0.2, 0.5, 0.3]).max() < 0.02


def test_a_line_passes_through_its_values():
    line = dataclasses.replace(BARS, kind="line")
    pixels = np.asarray(paint_chart(line, 200)).astype(int)
    rows, columns = np.nonzero(np.abs(pixels - GREEN).sum(-1) < 120)
    left, right = columns.min(), columns.max()
    ends = [rows[columns < left + 5].mean(), rows[columns > right - 5].mean()]
    top = rows.min()
    # Values 2 and 5 of 10, below a peak at 10: their distances from the peak are as 8 to 5.
    assert (ends[0] - top) / (ends[1] - top) == pytest.approx(8 / 5, rel=0.08)


def test_values_are_written_and_lines_drawn_where_the_chart_says_so():
    ink = lambda chart: (255 - np.asarray(paint_chart(chart, 96)).astype(int)).sum()
    for kind, values, scale in [("bar", (2, 10, 5), 10), ("line", (2, 10, 5), 10)]:
        plain = dataclasses.replace(BARS, kind=kind, values=values, scale=scale)
        assert ink(dataclasses.replace(plain, printed=True)) > ink(plain)
        assert ink(dataclasses.replace(plain, grid=True)) > ink(plain)


def test_a_size_that_nobody_could_read_is_refused_and_equal_charts_give_equal_pixels():
    with pytest.raises(ValueError, match="size=48 pixels are too few"):
        paint_chart(BARS, 48)
    assert paint_chart(BARS, 96).tobytes() == paint_chart(BARS, 96).tobytes()
