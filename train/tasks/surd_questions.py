"""Questions of the module simplify_surd: expressions in one square root, drawn with their exact value."""

import random
from fractions import Fraction

from train.tasks.math_trees import NoTreeError, half_range
from train.tasks.surds import Surd, add, format_surd, invert, multiply, square_root

_ROOTS = (2, 3, 5, 7, 11, 13, 17, 19)

# An expression's text, its value, and how strongly its outermost operator binds: 1 sum, 2 product, 3 anything closed.
_Part = tuple[str, Surd, int]


def draw_surd_question(rng: random.Random, entropy: float) -> tuple[str, str]:
    """Draw an expression and its simplest form, a rational number plus at most one root.

    The number of operations grows with the entropy, one for each unit; each sum adds a whole number or a multiple of
    the root, each product a small factor, a quotient has two roots, and at most two squares are taken.

    Args:
      rng: source of randomness.
      entropy: 3 to 10 in the published ranges.

    Returns:
      (expression, answer).

    Raises:
      NoTreeError: these draws divide by zero.

    Example:
      >>> draw_surd_question(random.Random(1), 3.0)
      ('sqrt(45) - 2', '-2 + 3*sqrt(5)')
    """
    root = rng.choice(_ROOTS)
    operations = max(2, round(entropy * rng.uniform(0.7, 1.3)))
    part = _draw(rng, root, operations, entropy / operations, squares=[2])
    return part[0], format_surd(part[1])


def _draw(rng: random.Random, root: int, operations: int, entropy: float, squares: list[int]) -> _Part:
    if operations == 0:
        return _atom(rng, root, entropy)
    kind = rng.random()
    if kind < 0.2 and squares[0] and operations >= 2:
        squares[0] -= 1
        text, value, _ = _draw(rng, root, operations - 1, entropy, squares)
        return f"({text})**2", multiply(value, value), 2
    if kind < 0.35:
        return _quotient(rng, root, operations, entropy)
    left_operations = rng.randint(0, operations - 1)
    left = _draw(rng, root, left_operations, entropy, squares)
    if kind < 0.55:
        factor = _small(rng)
        pair = [(_bracket(left, 2), left[1]), (str(factor), {1: Fraction(factor)})]
        rng.shuffle(pair)
        return f"{pair[0][0]}*{pair[1][0]}", multiply(pair[0][1], pair[1][1]), 2
    if rng.random() < 0.35:
        number = _small(rng)
        right: _Part = (str(number), {1: Fraction(number)}, 3)
    else:
        right = _draw(rng, root, operations - 1 - left_operations, entropy, squares)
    operator = rng.choice("+-")
    value = right[1] if operator == "+" else multiply({1: Fraction(-1)}, right[1])
    right_text = _bracket(right, 2) if operator == "-" else right[0]
    return f"{left[0]} {operator} {right_text}", add(left[1], value), 1


def _atom(rng: random.Random, root: int, entropy: float) -> _Part:
    """sqrt(root k^2), so that every atom is a multiple of one root."""
    factor = rng.randint(1, 1 + min(20, half_range(entropy)))
    return f"sqrt({root * factor * factor})", square_root(Fraction(root * factor * factor)), 3


def _quotient(rng: random.Random, root: int, operations: int, entropy: float) -> _Part:
    """(multiple of sqrt(root m)) / (multiple of sqrt(m)), which is a multiple of sqrt(root)."""
    common = rng.choice([number for number in (1, 2, 3, 5, 6, 7, 10, 11) if number % root])
    top, bottom = (_multiple(rng, radicand, entropy, operations > 1) for radicand in (root * common, common))
    if not bottom[1]:
        raise NoTreeError
    return f"{_bracket(top, 3)}/{_bracket(bottom, 3)}", multiply(top[1], invert(bottom[1])), 2


def _multiple(rng: random.Random, radicand: int, entropy: float, is_long: bool) -> _Part:
    atom = _atom(rng, radicand, entropy)
    if not is_long or rng.random() < 0.3:
        return atom
    factor = _small(rng)
    product = f"{factor}*{atom[0]}" if rng.random() < 0.5 else f"{atom[0]}*{factor}"
    value = multiply({1: Fraction(factor)}, atom[1])
    if rng.random() < 0.5:
        return product, value, 2
    operator = rng.choice("+-")
    signed = value if operator == "+" else multiply({1: Fraction(-1)}, value)
    return f"{atom[0]} {operator} {product}", add(atom[1], signed), 1


def _small(rng: random.Random) -> int:
    return rng.choice((-6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6))


def _bracket(part: _Part, least: int) -> str:
    return f"({part[0]})" if part[2] < least else part[0]
