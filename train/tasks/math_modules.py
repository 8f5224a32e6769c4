"""The fifteen arithmetic modules of DeepMind Mathematics: how questions are drawn, and how hard they are."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType

from train.tasks.expressions import Difficulty, evaluate, sample_expression
from train.tasks.math_answers import ORDINALS, format_decimal, nearest_root, to_base
from train.tasks.math_trees import draw_integer, draw_tree, draw_value, half_range, print_tree
from train.tasks.surd_questions import draw_surd_question

# Raised whenever the same seed would give other questions, so that data prepared earlier are never reused.
MODULES_VERSION = 1

_ADD = (
    "{p} + {q}", "{p}+{q}", "Calculate {p} + {q}.", "Work out {p} + {q}.", "What is {p} + {q}?",
    "What is {p} plus {q}?", "Add {p} and {q}.", "Add together {p} and {q}.", "Put together {p} and {q}.",
    "Sum {p} and {q}.", "Total of {p} and {q}.",
)  # fmt: skip
_SUBTRACT = (
    "{p} - {q}", "Calculate {p} - {q}.", "Work out {p} - {q}.", "What is {p} - {q}?",
    "What is {p} minus {q}?", "What is {p} take away {q}?", "What is {q} less than {p}?", "Subtract {q} from {p}.",
)  # fmt: skip
_DISTANCE = ("What is the difference between {p} and {q}?", "What is the distance between {p} and {q}?")
_MULTIPLY = (
    "{p}*{q}", "{p} * {q}", "Calculate {p}*{q}.", "Work out {p} * {q}.", "Multiply {p} and {q}.",
    "Product of {p} and {q}.", "What is the product of {p} and {q}?", "{p} times {q}", "What is {p} times {q}?",
)  # fmt: skip
_DIVIDE = ("{p} divided by {q}", "Calculate {p} divided by {q}.", "Divide {p} by {q}.", "What is {p} divided by {q}?")
_EXPRESSION = ("{}", "What is {}?", "What is the value of {}?", "Evaluate {}.", "Calculate {}.")
_VALUE_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One question: `problem` names what is asked whatever the wording, and decides the split."""

    problem: str
    question: str
    answer: str


Draw = Callable[[random.Random, float, bool], Drawn]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
    """One module.

    Args:
      draw: (rng, entropy, is_extrapolation) -> `Drawn`; it may raise `NoTreeError`.
      train: least and greatest entropy; its thirds are the levels easy, medium and hard.
      interpolate: entropy of the interpolation set.
      extrapolate: least and greatest entropy of the extrapolation set, None if the module has none.
      longer: name of the published extrapolation module.
    """

    draw: Draw
    train: tuple[float, float] = (3.0, 10.0)
    interpolate: float = 8.0
    extrapolate: tuple[float, float] | None = None
    longer: str | None = None

    def entropy(self, regime: str) -> tuple[float, float]:
        """Give the range of the entropy of a regime: train-easy, train-medium, train-hard, interpolate, extrapolate."""
        low, high = self.train
        third = (high - low) / 3
        return {
            "train-easy": (low, low + third),
            "train-medium": (low + third, high - third),
            "train-hard": (high - third, high),
            "interpolate": (self.interpolate, self.interpolate),
            "extrapolate": self.extrapolate,
        }[regime]


def _draw_number(rng: random.Random, entropy: float) -> Fraction:
    """An integer, or as likely a decimal whose last digit is not 0."""
    if rng.random() < 0.5:
        return Fraction(draw_integer(rng, entropy))
    half = max(half_range(entropy), 5)
    while True:
        digits = rng.randint(-half, half)
        if digits % 10:
            return Fraction(digits, 10 ** rng.randint(1, max(1, round(entropy))))


def _two_numbers(rng: random.Random, entropy: float) -> tuple[Fraction, Fraction]:
    share = rng.random()
    return _draw_number(rng, entropy * share), _draw_number(rng, entropy * (1 - share))


def _add_or_sub(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
    p, q = _two_numbers(rng, entropy)
    words = {"p": format_decimal(p), "q": format_decimal(q)}
    if rng.random() < 0.5:
        return Drawn(_problem("+", *words.values()), rng.choice(_ADD).format(**words), format_decimal(p + q))
    template = rng.choice(_SUBTRACT + _DISTANCE)
    value = abs(p - q) if template in _DISTANCE else p - q
    return Drawn(_problem("-", *words.values()), template.format(**words), format_decimal(value))


def _multiply(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
    p, q = _two_numbers(rng, entropy)
    words = {"p": format_decimal(p), "q": format_decimal(q)}
    return Drawn(_problem("*", *words.values()), rng.choice(_MULTIPLY).format(**words), format_decimal(p * q))


def _divide(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
    share = rng.random()
    q = rng.randint(1, half_range(entropy * share)) * rng.choice((-1, 1))
    p = draw_integer(rng, entropy * (1 - share))
    if rng.random() < 0.5:
        p *= q
    return Drawn(_problem("/", p, q), rng.choice(_DIVIDE).format(p=p, q=q), str(Fraction(p, q)))


def _in_base(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
    base, share, sign = rng.randint(2, 16), rng.random(), rng.choice("+-")
    p, q = draw_integer(rng, entropy * share), draw_integer(rng, entropy * (1 - share))
    text = f"{to_base(p, base)} {sign} {to_base(q, base)}"
    answer = to_base(p + q if sign == "+" else p - q, base)
    return Drawn(f"base {base}: {text}", f"In base {base}, what is {text}?", answer)


def _nearest_root(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
    kind = rng.random()
    degree = 2 if kind < 0.45 else 3 if kind < 0.7 else rng.randint(4, 10)
    number = rng.randint(2, 2 * half_range(entropy))
    name = rng.choice([word for word, meaning in ORDINALS.items() if meaning == degree])
    question = rng.choice((f"the {name} root of {number} to", f"{number} to the power of 1/{degree}, to"))
    return Drawn(
        f"root {degree} {number}", f"What is {question} the nearest integer?", str(nearest_root(number, degree))
    )


def _add_sub_multiple(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
    operands = (10, 11, 12) if is_extrapolation else _operands(entropy)
    expression = sample_expression(rng, Difficulty(entropy=(entropy, entropy), operands=operands))
    return Drawn(expression, rng.choice(_EXPRESSION).format(expression), str(evaluate(expression)))


def _tree_module(operators: str) -> Draw:
    def draw(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
        leaves = rng.choice((10, 11, 12) if is_extrapolation else _operands(entropy))
        value_entropy = max(1.0, _VALUE_SHARE * entropy)
        whole = is_extrapolation or rng.random() < 0.5
        value = draw_value(rng, value_entropy, whole=whole)
        expression = print_tree(draw_tree(rng, value, leaves, entropy - value_entropy, operators))
        return Drawn(expression, rng.choice(_EXPRESSION).format(expression), str(value))

    return draw


def _simplify_surd(rng: random.Random, entropy: float, is_extrapolation: bool) -> Drawn:
    expression, answer = draw_surd_question(rng, entropy)
    return Drawn(expression, f"Simplify {expression}.", answer)


def _operands(entropy: float) -> tuple[int, ...]:
    """Four or five operands; up to six from the medium level on, up to seven on the hard one."""
    return tuple(range(4, 6 + (entropy > 16 / 3) + (entropy > 23 / 3)))


def _problem(operator: str, p: object, q: object) -> str:
    return f"{p} {operator} {q}"


MODULES: Mapping[str, Module] = MappingProxyType(
    {
        "add_or_sub": Module(
            draw=_add_or_sub, train=(4.0, 16.0), interpolate=12.0, extrapolate=(16.0, 20.0), longer="add_or_sub_big"
        ),
        "add_sub_multiple": Module(draw=_add_sub_multiple, extrapolate=(10.0, 12.0), longer="add_sub_multiple_longer"),
        "add_or_sub_in_base": Module(draw=_in_base),
        "mul": Module(draw=_multiply, extrapolate=(10.0, 12.0), longer="mul_big"),
        "div": Module(draw=_divide, extrapolate=(10.0, 12.0), longer="div_big"),
        "mul_div_multiple": Module(draw=_tree_module("*/"), extrapolate=(10.0, 12.0), longer="mul_div_multiple_longer"),
        "mixed": Module(draw=_tree_module("+-*/"), extrapolate=(10.0, 12.0), longer="mixed_longer"),
        "nearest_integer_root": Module(draw=_nearest_root),
        "simplify_surd": Module(draw=_simplify_surd),
    }
)
