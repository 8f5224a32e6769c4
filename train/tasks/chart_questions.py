"""Questions about a chart of ours, with answers from its table: short, so that a model that reads letters can learn."""

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from train.tasks.chart import Chart

# Raised whenever the same seed would give other questions.
QUESTIONS_VERSION = 1

Asked = tuple[str, str]
_PARTS = MappingProxyType({"bar": "bars", "line": "points", "pie": "slices"})


def ask_questions(chart: Chart, rng: random.Random, count: int) -> list[Asked]:
    """Ask different kinds of questions about a chart.

    Args:
      chart: what they are about.
      rng: chooses kinds, and what each asks about.
      count: how many, at most the number of `KINDS`.

    Returns:
      (question, answer) pairs; an answer is a whole number or the letter of a label.

    Example:
      >>> from train.tasks.chart import draw_chart
      >>> chart = draw_chart(random.Random(3))
      >>> len(ask_questions(chart, random.Random(0), 2))
      2
    """
    return [KINDS[kind](chart, rng) for kind in rng.sample(sorted(KINDS), count)]


def _value(chart: Chart, rng: random.Random) -> Asked:
    label, value = rng.choice(_rows(chart))
    return f"Value of {label}?", str(value)


def _largest(chart: Chart, rng: random.Random) -> Asked:
    return "Largest?", max(_rows(chart), key=lambda row: row[1])[0]


def _smallest(chart: Chart, rng: random.Random) -> Asked:
    return "Smallest?", min(_rows(chart), key=lambda row: row[1])[0]


def _highest_value(chart: Chart, rng: random.Random) -> Asked:
    return "Highest value?", str(max(chart.values))


def _lowest_value(chart: Chart, rng: random.Random) -> Asked:
    return "Lowest value?", str(min(chart.values))


def _difference(chart: Chart, rng: random.Random) -> Asked:
    low, high = sorted(rng.sample(_rows(chart), 2), key=lambda row: row[1])
    return f"{high[0]} minus {low[0]}?", str(high[1] - low[1])


def _sum(chart: Chart, rng: random.Random) -> Asked:
    first, second = rng.sample(_rows(chart), 2)
    return f"{first[0]} plus {second[0]}?", str(first[1] + second[1])


def _count(chart: Chart, rng: random.Random) -> Asked:
    return f"How many {_PARTS[chart.kind]}?", str(len(chart.values))


def _count_above(chart: Chart, rng: random.Random) -> Asked:
    # A value of the chart as the bound: it lies well apart from the others, or is told apart as itself.
    bound = rng.choice(chart.values)
    return f"How many above {bound}?", str(sum(value > bound for value in chart.values))


def _rows(chart: Chart) -> list[tuple[str, int]]:
    return list(zip(chart.labels, chart.values, strict=True))


KINDS: Mapping[str, Callable[[Chart, random.Random], Asked]] = MappingProxyType(
    {
        "value": _value,
        "largest": _largest,
        "smallest": _smallest,
        "highest value": _highest_value,
        "lowest value": _lowest_value,
        "difference": _difference,
        "sum": _sum,
        "count": _count,
        "count above": _count_above,
    }
)
