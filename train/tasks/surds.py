"""Exact arithmetic with rational numbers and square roots: sums of a fraction times a root, evaluated from text."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

# radicand (square-free) -> coefficient, none of them 0: {1: 2, 7: 1/5} is 2 + sqrt(7)/5
Surd = Mapping[int, Fraction]

_TOKEN = re.compile(r" *(?P<number>[0-9]+(?:\.[0-9]+)?)| *(?P<sign>\*\*|sqrt|[-+*/()])", re.ASCII)
# How strongly an operator binds; "neg" is the sign before an operand.
_BINDING = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "neg": 3, "**": 4}
_MAX_EXPONENT, _MAX_RADICAND = 8, 10**12


def evaluate_exact(text: str) -> Surd:
    """Evaluate sums, products, quotients, integer powers and square roots exactly, in linear time but for big numbers.

    Args:
      text: for example ``(2*sqrt(12) - -1)**2/3``; decimals are allowed.

    Returns:
      The value as a sum of roots: radicand -> coefficient; a rational number has the radicand 1 alone, and 0 none.

    Raises:
      ValueError: anything else in the text, a division by zero, or a divisor of more than two terms.

    Example:
      >>> evaluate_exact("(1 + sqrt(12))**2 - 3*-0.5")
      {1: Fraction(29, 2), 3: Fraction(4, 1)}
    """
    values: list[Surd] = []
    operators: list[str] = []
    wants_operand, position, end = True, 0, len(text.rstrip(" "))
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"evaluate_exact: {text[position : position + 20]!r} is no part of arithmetic.")
        position, sign = match.end(), match["sign"]
        if wants_operand and match["number"]:
            values.append(_clean({1: Fraction(match["number"])}))
            wants_operand = False
        elif wants_operand and sign in ("(", "sqrt", "-", "+"):
            if sign != "+":
                operators.append("neg" if sign == "-" else sign)
        elif not wants_operand and sign == ")" and "(" in operators:
            while operators[-1] != "(":
                _apply(operators.pop(), values)
            operators.pop()
            if operators and operators[-1] == "sqrt":
                _apply(operators.pop(), values)
        elif not wants_operand and sign in _BINDING and sign != "(":
            while operators and operators[-1] != "sqrt" and _BINDING[operators[-1]] >= _BINDING[sign]:
                _apply(operators.pop(), values)
            operators.append(sign)
            wants_operand = True
        else:
            raise ValueError(f"evaluate_exact: unexpected {match[0]!r} before position {position} of {text[:80]!r}.")
    while operators and not wants_operand and operators[-1] not in ("(", "sqrt"):
        _apply(operators.pop(), values)
    if operators or len(values) != 1:
        raise ValueError(f"evaluate_exact: {text[:80]!r} ends too early.")
    return values[0]


def add(left: Surd, right: Surd) -> Surd:
    """Add two sums of roots.

    Example:
      >>> add({1: Fraction(1), 2: Fraction(3)}, {2: Fraction(-3)})
      {1: Fraction(1, 1)}
    """
    return _clean({root: left.get(root, 0) + right.get(root, 0) for root in sorted({*left, *right})})


def multiply(left: Surd, right: Surd) -> Surd:
    """Multiply two sums of roots: a sqrt(s) * b sqrt(t) = a b g sqrt(s t / g^2) with g = gcd(s, t).

    Example:
      >>> multiply({6: Fraction(1)}, {2: Fraction(1)})
      {3: Fraction(2, 1)}
    """
    product: dict[int, Fraction] = {}
    for s, a in left.items():
        for t, b in right.items():
            common = math.gcd(s, t)
            root = (s // common) * (t // common)
            product[root] = product.get(root, Fraction(0)) + a * b * common
    return _clean(dict(sorted(product.items())))


def invert(value: Surd) -> Surd:
    """Give 1 / value for one or two terms, by the conjugate: 1 / (x + y) = (x - y) / (x^2 - y^2).

    Raises:
      ValueError: zero, or more than two terms.

    Example:
      >>> invert({3: Fraction(2)})
      {3: Fraction(1, 6)}
    """
    if not 1 <= len(value) <= 2:
        raise ValueError(f"invert: cannot divide by {dict(value)}: wanted one or two terms.")
    (s, a), *rest = value.items()
    if not rest:
        return {s: 1 / (a * s)}
    [(t, b)] = rest
    norm = a * a * s - b * b * t  # not 0: the square roots of different square-free numbers are no multiples
    return _clean({s: a / norm, t: -b / norm})


def format_surd(value: Surd) -> str:
    """Write a sum of at most one root and a rational number, as the published answers do.

    The smaller term comes first, but a positive rational number stands before a negative root.

    Raises:
      ValueError: two different roots.

    Example:
      >>> format_surd({1: Fraction(-5), 3: Fraction(2)}), format_surd({7: Fraction(4, 25), 1: Fraction(16)})
      ('-5 + 2*sqrt(3)', '4*sqrt(7)/25 + 16')
    """
    roots = [(root, factor) for root, factor in value.items() if root != 1]
    if len(roots) > 1:
        raise ValueError(f"format_surd: {dict(value)} has two roots; wanted at most one.")
    rational = value.get(1, Fraction(0))
    if not roots:
        return str(rational)
    [(root, factor)] = roots
    text = f"sqrt({root})" if abs(factor.numerator) == 1 else f"{abs(factor.numerator)}*sqrt({root})"
    text = text if factor.denominator == 1 else f"{text}/{factor.denominator}"
    if not rational:
        return text if factor > 0 else f"-{text}"
    same_sign = (rational > 0) == (factor > 0)
    # Compare squares: both terms have one sign where this matters.
    root_is_greater = factor**2 * root > rational**2
    if same_sign and root_is_greater == (factor < 0):
        return f"{text if factor > 0 else '-' + text} {'+' if rational > 0 else '-'} {abs(rational)}"
    return f"{rational} {'+' if factor > 0 else '-'} {text}"


def square_root(number: Fraction) -> Surd:
    """Give the square root of a fraction: sqrt(p / q) = sqrt(p q) / q, the square factors taken out.

    Raises:
      ValueError: a negative number, or one whose factors would take long to find.

    Example:
      >>> square_root(Fraction(12)), square_root(Fraction(1, 2))
      ({3: Fraction(2, 1)}, {2: Fraction(1, 2)})
    """
    rest = number.numerator * number.denominator
    if not 0 <= rest <= _MAX_RADICAND:
        raise ValueError(f"square_root: {number} is negative or too large to factor.")
    if not rest:
        return {}
    root, factor, divisor = 1, 1, 2
    while divisor * divisor <= rest:
        while rest % (divisor * divisor) == 0:
            rest //= divisor * divisor
            factor *= divisor
        if rest % divisor == 0:
            rest //= divisor
            root *= divisor
        divisor += 1
    return _clean({root * rest: Fraction(factor, number.denominator)})


def _negate(value: Surd) -> Surd:
    return {root: -factor for root, factor in value.items()}


def _power(value: Surd, exponent: Surd) -> Surd:
    number = exponent.get(1, Fraction(0))
    if set(exponent) - {1} or number.denominator != 1 or not 0 <= number <= _MAX_EXPONENT:
        raise ValueError(f"evaluate_exact: exponents are whole numbers from 0 to {_MAX_EXPONENT}.")
    result: Surd = {1: Fraction(1)}
    for _ in range(int(number)):
        result = multiply(result, value)
    return result


def _root(value: Surd) -> Surd:
    if set(value) - {1}:
        raise ValueError("evaluate_exact: the root of a root is not supported.")
    return square_root(value.get(1, Fraction(0)))


_UNARY = MappingProxyType({"neg": _negate, "sqrt": _root})
_BINARY = MappingProxyType(
    {
        "+": add,
        "-": lambda left, right: add(left, _negate(right)),
        "*": multiply,
        "/": lambda left, right: multiply(left, invert(right)),
        "**": _power,
    }
)


def _apply(operator: str, values: list[Surd]) -> None:
    right = values.pop()
    values.append(_UNARY[operator](right) if operator in _UNARY else _BINARY[operator](values.pop(), right))


def _clean(value: Surd) -> Surd:
    return {root: factor for root, factor in value.items() if factor}
