"""Trees of integers joined by sums, products and quotients: drawn for a given exact value, and printed."""

import math
import random
from fractions import Fraction

# An integer, or (operator, left tree, right tree).
Tree = int | tuple[str, "Tree", "Tree"]


class NoTreeError(ValueError):
    """The draws led to a leaf that is no integer, or a division by zero; draw again."""


def draw_value(rng: random.Random, entropy: float, *, whole: bool) -> Fraction:
    """Draw the value of an expression: an integer up to h(entropy) = ceil(10^entropy / 2), or a fraction p / q.

    For a fraction the entropy is shared between p and q at random, and q is at least 2 in lowest terms.
    """
    if whole:
        return Fraction(draw_integer(rng, entropy))
    while True:
        share = rng.random() * entropy
        top, bottom = draw_integer(rng, share), rng.randint(2, max(2, half_range(entropy - share)))
        value = Fraction(top, bottom)
        if value.denominator > 1:
            return value


def draw_integer(rng: random.Random, entropy: float) -> int:
    """Draw one of about 10^entropy integers, symmetric about 0."""
    half = half_range(entropy)
    return rng.randint(-half, half)


def half_range(entropy: float) -> int:
    """Give h(entropy) = ceil(10^entropy / 2), by which integers of an entropy are bounded.

    Example:
      >>> half_range(2.0), half_range(0.0)
      (50, 1)
    """
    return math.ceil(10.0**entropy / 2)


def draw_tree(rng: random.Random, value: Fraction, leaves: int, entropy: float, operators: str) -> Tree:
    """Draw a tree of `leaves` integers whose value is given.

    A node draws one side, at the entropy of its share of the splits that are left, and the other side follows from the
    value; a fraction takes at least two leaves, since leaves are integers.

    Args:
      rng: source of randomness.
      value: the exact value of the tree.
      leaves: how many integers.
      entropy: log10 of the number of choices, over all splits.
      operators: those allowed, "*/" or "+-*/".

    Raises:
      NoTreeError: these draws fit no tree.
    """
    if leaves == 1:
        if value.denominator != 1:
            raise NoTreeError
        return int(value)
    here = entropy / (leaves - 1)
    if leaves == 2 and value.denominator > 1:
        factor = _nonzero(rng, here)
        return ("/", value.numerator * factor, value.denominator * factor)
    operator = rng.choice(operators)
    left_leaves = rng.randint(1, leaves - 1)
    right_leaves = leaves - left_leaves
    drawn_is_left = rng.random() < 0.5
    drawn_leaves, other_leaves = (left_leaves, right_leaves) if drawn_is_left else (right_leaves, left_leaves)
    drawn = _side(rng, value, here, operator, drawn_leaves, other_leaves)
    other = _other_side(value, drawn, operator, drawn_is_left)
    left, right = (drawn, other) if drawn_is_left else (other, drawn)
    rest = entropy - here
    left_splits, right_splits = left_leaves - 1, right_leaves - 1
    share = rng.betavariate(left_splits, right_splits) if left_splits and right_splits else float(left_splits > 0)
    return (
        operator,
        draw_tree(rng, left, left_leaves, rest * share, operators),
        draw_tree(rng, right, right_leaves, rest * (1 - share), operators),
    )


def print_tree(tree: Tree, parent: str = "", is_right: bool = False) -> str:
    """Print a tree with the published blanks and brackets.

    Sums have blanks, products none; a side of a quotient is bracketed unless it is a number without a sign; a sum in a
    product is bracketed, and so are a difference in a sum and a sum that is subtracted.

    Example:
      >>> print_tree(("-", ("*", 3, ("/", -2, 4)), ("+", 1, -5)))
      '3*(-2)/4 - (1 + -5)'
    """
    if isinstance(tree, int):
        return f"({tree})" if parent == "/" and tree < 0 else str(tree)
    operator, left, right = tree
    if operator in "+-":
        text = f"{print_tree(left, operator)} {operator} {print_tree(right, operator, True)}"
        bracketed = parent in ("*", "/") or (parent == "+" and operator == "-") or (parent == "-" and is_right)
    else:
        text = f"{print_tree(left, operator)}{operator}{print_tree(right, operator, True)}"
        bracketed = parent == "/"
    return f"({text})" if bracketed else text


def _nonzero(rng: random.Random, entropy: float) -> int:
    return rng.randint(1, half_range(entropy)) * rng.choice((-1, 1))


def _side(
    rng: random.Random, value: Fraction, entropy: float, operator: str, drawn_leaves: int, other_leaves: int
) -> Fraction:
    """Draw one side of a node so that the other can be made of its number of leaves."""
    if operator in "+-":
        if other_leaves == 1 and value.denominator > 1:  # an integer is left over only if this side takes the fraction
            return value + draw_integer(rng, entropy)
        return Fraction(draw_integer(rng, entropy))
    if operator == "*" and other_leaves == 1 and drawn_leaves == 1 and value:
        divisors = [number for number in range(1, min(abs(int(value)), 200) + 1) if value % number == 0]
        return Fraction(rng.choice(divisors) * rng.choice((-1, 1)))
    if drawn_leaves == 1:
        return Fraction(_nonzero(rng, entropy))
    share = rng.random() * entropy
    return Fraction(_nonzero(rng, share), abs(_nonzero(rng, entropy - share)))


def _other_side(value: Fraction, drawn: Fraction, operator: str, drawn_is_left: bool) -> Fraction:
    if operator == "+":
        return value - drawn
    if operator == "-":
        return drawn - value if drawn_is_left else value + drawn
    if operator == "*":
        return value / drawn
    if not drawn_is_left:
        return value * drawn
    if not value:  # nothing but 0 divided by something is 0
        raise NoTreeError
    return drawn / value
