"""Graders: from the text of a prediction and of a gold answer to right or wrong, and to the two numbers."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

# Far above any answer of the tasks (30 characters), and low enough that nothing a model writes costs time or memory.
MAX_NUMBER_CHARACTERS = 64

# Signed integer, decimal with digits on both sides of the point, or fraction. ASCII only, and every part is anchored on
# digits, so matching is linear. No exponent, comma, blank, "nan" or "inf".
_NUMBER = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]+)(?:\.(?P<decimals>[0-9]+)|/(?P<denominator>[0-9]+))?", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grade:
    """The verdict on one prediction.

    Args:
      correct: whether the grader's rule accepts the prediction.
      value: number that the prediction states, exactly; None if it states none.
      gold_value: number that the gold answer states; None if it is not a number (an expression, a word).
    """

    correct: bool
    value: Fraction | None
    gold_value: Fraction | None

    @property
    def parsed(self) -> bool:
        """Whether the prediction states a number."""
        return self.value is not None


def parse_number(text: str) -> Fraction | None:
    """Read a text that is one number and nothing else, exactly.

        number = [sign] digits | [sign] digits "." digits | [sign] digits "/" digits

    Args:
      text: blanks around it are ignored; at most 64 characters otherwise.

    Returns:
      Its value, or None: also for a denominator of zero, "nan", "inf", "1e5", "1_000", "1,000", ".5" and digits of
      other scripts.

    Example:
      >>> parse_number("-3"), parse_number("0.50"), parse_number("2/4"), parse_number("nan")
      (Fraction(-3, 1), Fraction(1, 2), Fraction(1, 2), None)
    """
    text = text.strip()
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER_CHARACTERS else None
    if match is None:
        return None
    decimals, denominator = match["decimals"] or "", int(match["denominator"] or 1)
    if denominator == 0:
        return None
    magnitude = Fraction(int(match["whole"] + decimals), denominator * 10 ** len(decimals))
    return -magnitude if match["sign"] == "-" else magnitude


def grade_math_exact(prediction: str, gold: str) -> Grade:
    """Accept the gold text itself, blanks around it aside: the exact match of the arithmetic tasks.

    Example:
      >>> grade_math_exact(" -7\\n", "-7").correct, grade_math_exact("7.0", "7").correct
      (True, False)
    """
    return Grade(
        correct=prediction.strip() == gold.strip(), value=parse_number(prediction), gold_value=parse_number(gold)
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


GRADERS: Mapping[str, Callable[[str, str], Grade]] = MappingProxyType(
    {
        "math_exact": grade_math_exact,
        "math_value": grade_math_value,
    }
)
