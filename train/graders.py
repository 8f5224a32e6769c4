"""Graders: from the text of a prediction and of a gold answer to right or wrong, and to the two numbers.

Every grader accepts the gold text itself, blanks around it aside; beyond that each has its own rule.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from types import MappingProxyType

from train.clock_time import parse_time
from train.number_text import has_mark, last_number, number_after_mark, parse_float, parse_grouped, parse_number

# Published relaxed accuracy: a number may be off by this share of the gold number.
CHART_TOLERANCE = Fraction(1, 20)
# With strict years a gold answer that is a whole number of this range has to be met exactly.
YEARS = range(1800, 2101)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grade:
    """The verdict on one prediction.

    Args:
      correct: whether the grader's rule accepts the prediction.
      value: number that the prediction states, exactly; None if it states none.
      gold_value: number that the gold answer states; None if it is not a number (an expression, a word).
      is_time: whether both numbers are minutes of a twelve-hour dial (60 to 779).
    """

    correct: bool
    value: Fraction | None
    gold_value: Fraction | None
    is_time: bool = False

    @property
    def parsed(self) -> bool:
        """Whether the prediction states a number."""
        return self.value is not None


def grade_gsm8k_strict(prediction: str, gold: str) -> Grade:
    """Accept the number after the last ``####`` of the prediction; blanks after the mark and a currency are optional.

    Args:
      prediction: anything; the mark may stand anywhere in it.
      gold: a whole solution with its ``####`` line, or the bare answer.

    Example:
      >>> grade_gsm8k_strict("3 x 6 = 18\\n#### 18.00 dollars", "#### 18").correct
      True
      >>> grade_gsm8k_strict("The answer is 18.", "#### 18").correct
      False
    """
    return _grade_number(prediction, gold, number_after_mark)


def grade_gsm8k_flexible(prediction: str, gold: str) -> Grade:
    """Accept the last well-formed number of the prediction, see `train.number_text.last_number`.

    Args:
      prediction: anything.
      gold: a whole solution with its ``####`` line, or the bare answer; SVAMP's "51.0" is 51.

    Example:
      >>> grade_gsm8k_flexible("She earns **$70,000.00** in all.", "#### 70000").correct
      True
    """
    return _grade_number(prediction, gold, last_number)


def _grade_number(prediction: str, gold: str, read: Callable[[str], Fraction | None]) -> Grade:
    gold_value = number_after_mark(gold) if has_mark(gold) else parse_grouped(gold)
    same_text = _same_text(prediction, gold)
    value = gold_value if same_text else read(prediction)
    return Grade(correct=same_text or (value is not None and value == gold_value), value=value, gold_value=gold_value)


def grade_math_exact(prediction: str, gold: str) -> Grade:
    """Accept the gold text itself, blanks around it aside: the exact match of the arithmetic tasks.

    Example:
      >>> grade_math_exact(" -7\\n", "-7").correct, grade_math_exact("7.0", "7").correct
      (True, False)
    """
    return Grade(
        correct=_same_text(prediction, gold), value=parse_number(prediction), gold_value=parse_number(gold)
    )


def grade_math_value(prediction: str, gold: str) -> Grade:
    """Accept the gold text or another spelling of its number: 0.50 is 1/2, and -0 is 0.

    Example:
      >>> grade_math_value("7.0", "7").correct, grade_math_value("0.333", "1/3").correct
      (True, False)
    """
    grade = grade_math_exact(prediction, gold)
    equal = grade.value is not None and grade.value == grade.gold_value
    return dataclasses.replace(grade, correct=grade.correct or equal)


def grade_clock(prediction: str, gold: str) -> Grade:
    """Accept the same place of the hands: hour mod 12 and minute; the numbers are minutes of the dial.

    Args:
      prediction: anything; the last time in it counts, see `train.clock_time.parse_time`.
      gold: a time.

    Example:
      >>> grade_clock("It is 09:05.", "9:05").correct, grade_clock("21:05", "9:05").correct
      (True, True)
    """
    value, gold_value = (
        None if minutes is None else Fraction(minutes) for minutes in (parse_time(prediction), parse_time(gold))
    )
    correct = _same_text(prediction, gold) or (value is not None and value == gold_value)
    return Grade(correct=correct, value=value, gold_value=gold_value, is_time=True)


def grade_chartqa(prediction: str, gold: str, *, strict_years: bool = False) -> Grade:
    """Give ChartQA's published relaxed accuracy: numbers within 5 % of the gold number, other texts equal but for case.

        correct = |value - gold_value| <= |gold_value| / 20

    A text that ends in a percent sign is a hundredth of its number. A gold 0 is a text: "0.0" is wrong for it.

    Args:
      prediction: the bare answer; a sentence around it is wrong.
      gold: the label.
      strict_years: where the gold answer is a whole number from 1800 to 2100, accept that number alone.

    Example:
      >>> grade_chartqa("14.7", "14").correct, grade_chartqa("14.8", "14").correct, grade_chartqa("2%", "2").correct
      (True, False, False)
      >>> grade_chartqa("2010", "2008").correct, grade_chartqa("2010", "2008", strict_years=True).correct
      (True, False)

    References:
      Masry, Long, Tan, Joty, Hoque, "ChartQA", 2022, section 5.1.
    """
    value, gold_value = _chart_number(prediction), _chart_number(gold)
    if value is not None and gold_value:
        correct = _is_near(value, gold_value, strict_years=strict_years)
    else:
        correct = prediction.strip().lower() == gold.strip().lower()
    return Grade(correct=correct or _same_text(prediction, gold), value=value, gold_value=gold_value)


def grade_chartqa_lenient(prediction: str, gold: str, *, strict_years: bool = False) -> Grade:
    """Accept what `grade_chartqa` does, and other spellings of it, of both texts alike.

    Thousands commas, a currency and one full stop at the end are passed over; a percent sign stands for either form, so
    2% meets 2 and 0.02; 0 is a number. Lists keep their order.

    Args:
      prediction: the bare answer; a sentence around it is wrong.
      gold: the label.
      strict_years: as in `grade_chartqa`.

    Example:
      >>> grade_chartqa_lenient("$1,931.", "1931").correct, grade_chartqa_lenient("2%", "2").correct
      (True, True)
    """
    values, gold_values = _lenient_numbers(prediction), _lenient_numbers(gold)
    if values and gold_values:
        if len(values) == len(gold_values):
            value, gold_value = values[0], gold_values[0]
        else:  # one percent sign leaves both forms open, and the nearer one is meant
            pairs = itertools.product(values, gold_values)
            value, gold_value = min(pairs, key=lambda pair: abs(pair[0] - pair[1]))
        correct = _is_near(value, gold_value, strict_years=strict_years)
    else:
        value, gold_value = (next(iter(numbers), None) for numbers in (values, gold_values))
        correct = _without_stop(prediction).lower() == _without_stop(gold).lower()
    return Grade(correct=correct or _same_text(prediction, gold), value=value, gold_value=gold_value)


def _chart_number(text: str) -> Fraction | None:
    text = text.strip()
    if not text.endswith("%"):
        return parse_float(text)
    value = parse_float(text[:-1])
    return None if value is None else value / 100


def _lenient_numbers(text: str) -> list[Fraction]:
    """The numbers that a text may mean: one, or with a percent sign the number itself and its hundredth."""
    text = _without_stop(text)
    bare = text.removesuffix("%").rstrip()
    value = parse_float(bare)
    if value is None and "/" not in bare:
        value = parse_grouped(bare)
    if value is None:
        return []
    return [value] if bare == text else [value, value / 100]


def _is_near(value: Fraction, gold_value: Fraction, *, strict_years: bool) -> bool:
    if strict_years and gold_value in YEARS:
        return value == gold_value
    return abs(value - gold_value) <= CHART_TOLERANCE * abs(gold_value)


def _without_stop(text: str) -> str:
    return text.strip().removesuffix(".").rstrip()


def _same_text(prediction: str, gold: str) -> bool:
    return prediction.strip() == gold.strip()


GRADERS: Mapping[str, Callable[[str, str], Grade]] = MappingProxyType(
    {
        "math_exact": grade_math_exact,
        "math_value": grade_math_value,
        "gsm8k_strict": grade_gsm8k_strict,
        "gsm8k_flexible": grade_gsm8k_flexible,
        "clock": grade_clock,
        "chartqa": grade_chartqa,
        "chartqa_strict_years": partial(grade_chartqa, strict_years=True),
        "chartqa_lenient": grade_chartqa_lenient,
    }
)
