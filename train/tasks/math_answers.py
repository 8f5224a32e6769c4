"""Answers of arithmetic questions, worked out from their text alone: what checks every generated example."""

import re
from fractions import Fraction

from train.tasks.surds import evaluate_exact, format_surd

DIGITS = "0123456789abcdef"
ORDINALS = {
    "square": 2, "third": 3, "cube": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10,
}  # fmt: skip

_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
_P, _Q = rf"(?P<p>{_NUMBER})", rf"(?P<q>{_NUMBER})"
# Questions in words -> arithmetic with {p} and {q} in brackets.
_IN_WORDS = [
    (rf"(?:Add|Add together|Put together|Sum|Total of) {_P} and {_Q}\.", "({p}) + ({q})"),
    (rf"What is {_P} plus {_Q}\?", "({p}) + ({q})"),
    (rf"What is {_P} (?:minus|take away) {_Q}\?", "({p}) - ({q})"),
    (rf"What is the (?:difference|distance) between {_P} and {_Q}\?", "({p}) - ({q})"),
    (rf"(?:What is {_P} less than {_Q}\?|Subtract (?P<p2>{_NUMBER}) from (?P<q2>{_NUMBER})\.)", "({q}) - ({p})"),
    (rf"(?:Multiply|What is the product of|Product of) {_P} and {_Q}[.?]", "({p})*({q})"),
    (rf"(?:What is )?{_P} times {_Q}\??", "({p})*({q})"),
    (rf"(?:Calculate |What is )?{_P} divided by {_Q}[.?]?", "({p})/({q})"),
    (rf"Divide {_P} by {_Q}\.", "({p})/({q})"),
]
_WORDS = [(re.compile(pattern, re.ASCII), arithmetic) for pattern, arithmetic in _IN_WORDS]
_SYMBOLS = re.compile(
    r"(?:What is the value of |What is |Evaluate |Calculate |Work out |Simplify )?(?P<text>[-+*/(). 0-9sqrt]+?)[?.]?",
    re.ASCII,
)
_ROOT = re.compile(
    rf"What is (?:the (?P<ordinal>{'|'.join(ORDINALS)}) root of (?P<n>[0-9]+)|(?P<m>[0-9]+) to the power of "
    r"1/(?P<degree>[0-9]+),) to the nearest integer\?",
    re.ASCII,
)
_BASE = re.compile(
    r"In base (?P<base>[0-9]+), what is (?P<p>-?[0-9a-f]+) (?P<sign>[-+]) (?P<q>-?[0-9a-f]+)\?", re.ASCII
)


def solve(question: str) -> str:
    """Answer a question of DeepMind's arithmetic modules exactly, in the published spelling.

    It reads the question and nothing else, so it checks whatever made the answer.

    Args:
      question: of one of the fifteen modules, in any of its published templates.

    Returns:
      An integer, a decimal, a fraction in lowest terms, digits of a base, or a sum with one root.

    Raises:
      ValueError: no question of this kind.

    Example:
      >>> solve("Subtract -1.67456 from 2455.95."), solve("Divide -28 by 42."), solve("In base 16, what is -5f6 + 4?")
      ('2457.62456', '-2/3', '-5f2')
    """
    if match := _ROOT.fullmatch(question):
        degree = ORDINALS[match["ordinal"]] if match["ordinal"] else int(match["degree"])
        return str(nearest_root(int(match["n"] or match["m"]), degree))
    if match := _BASE.fullmatch(question):
        base = int(match["base"])
        p, q = int(match["p"], base), int(match["q"], base)
        return to_base(p + q if match["sign"] == "+" else p - q, base)
    for pattern, arithmetic in _WORDS:
        if match := pattern.fullmatch(question):
            found = match.groupdict()
            p, q = (found[name] or found.get(f"{name}2") for name in ("p", "q"))
            value = evaluate_exact(arithmetic.format(p=p, q=q))
            if "distance" in question or "difference" in question:
                value = {root: abs(factor) for root, factor in value.items()}
            return _spell(value, question, has_division="/" in arithmetic)
    if match := _SYMBOLS.fullmatch(question):
        return _spell(evaluate_exact(match["text"]), question, has_division="/" in match["text"])
    raise ValueError(f"solve: {question[:100]!r} is no question of the arithmetic modules.")


def nearest_root(number: int, degree: int) -> int:
    """Give the integer nearest to the root of a whole number, by integer arithmetic.

        r with (2 r - 1)^degree < 2^degree number < (2 r + 1)^degree

    Example:
      >>> nearest_root(2598, 3), nearest_root(10**40 + 1, 2)
      (14, 100000000000000000000)
    """
    low, high = 0, 1 << (number.bit_length() // degree + 2)
    while low < high:  # the least r whose upper bound lies above the number
        middle = (low + high) // 2
        if (2 * middle + 1) ** degree > number << degree:
            high = middle
        else:
            low = middle + 1
    return low


def to_base(number: int, base: int) -> str:
    """Write a whole number in base 2 to 16, lower case, the sign in front.

    Example:
      >>> to_base(-1522, 16), to_base(0, 2)
      ('-5f2', '0')
    """
    digits, rest = "", abs(number)
    while rest or not digits:
        rest, digit = divmod(rest, base)
        digits = DIGITS[digit] + digits
    return f"-{digits}" if number < 0 else digits


def format_decimal(value: Fraction) -> str:
    """Write a fraction whose decimals end: no trailing zero, a digit before the point, no exponent.

    Raises:
      ValueError: its decimals do not end.

    Example:
      >>> format_decimal(Fraction(-1, 8)), format_decimal(Fraction(30))
      ('-0.125', '30')
    """
    places, scaled = 0, value
    while scaled.denominator != 1:
        if scaled.denominator % 2 and scaled.denominator % 5:
            raise ValueError(f"format_decimal: the decimals of {value} do not end.")
        scaled, places = scaled * 10, places + 1
    digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
    text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
    return f"-{text}" if value < 0 else text


def _spell(value: dict[int, Fraction], question: str, *, has_division: bool) -> str:
    if set(value) <= {1} and not has_division:
        return format_decimal(value.get(1, Fraction(0)))
    return format_surd(value)
