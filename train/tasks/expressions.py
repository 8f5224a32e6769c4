"""Integer add/subtract chains: how they are drawn, printed, partitioned into splits and, independently, evaluated."""

import dataclasses
import hashlib
import math
import random
import re

# Raised whenever the same seed would give other expressions, so that data prepared earlier is never reused.
GENERATOR_VERSION = 1

_BUCKETS = 16
_SPLIT_OF_BUCKET = ("interpolate", "longer", *["train"] * (_BUCKETS - 2))
_TOKEN = re.compile(r"[ ]*([0-9]+|[-+()])", re.ASCII)
_MAX_TRIES = 1_000_000

# A tree is an operand, or (operator, left tree, right tree).
Tree = int | tuple[str, "Tree", "Tree"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard an expression is: a number of choices, shared among its operands.

        entropy E ~ U[entropy]    operands n ~ U(operands)    log10 of the number of choices
        value v ~ U{-h(a), ..., h(a)},  a = max(1, value_share E),  h(a) = ceil(10^a / 2)
        S = max(0, E - a + log10 Catalan(n - 1) + tree_offset)       what is left for the n - 1 splits
        a node of n leaves with budget S draws one of its two sides from U{-h(S/(n-1)), ...}, the other follows from v;
        the rest of S goes to the two subtrees by a beta variate with their numbers of splits as parameters

    Catalan(n - 1) counts the trees of n leaves. The rule was found from the published text and from statistics of real
    questions; the defaults reproduce those statistics.

    Args:
      entropy: least and greatest E.
      operands: the numbers of operands to choose from, each entry equally likely.
      value_share: share of E that goes to the value of the whole expression.
      tree_offset: correction of S.
      max_operand: expressions with a larger absolute operand are drawn again; None sets no limit.

    References:
      Saxton, Grefenstette, Hill, Kohli, "Analysing Mathematical Reasoning Abilities of Neural Models", 2019, section 2
      (entropy, uniform answers, interpolation and extrapolation).
    """

    entropy: tuple[float, float]
    operands: tuple[int, ...]
    value_share: float = 0.25
    tree_offset: float = -0.5
    max_operand: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.entropy[0] <= self.entropy[1] or not self.operands or min(self.operands) < 2:
            raise ValueError(
                "Difficulty: entropy must be (low, high), 0 <= low <= high, and every number of operands at least 2; "
                f"got entropy={self.entropy} and operands={self.operands}."
            )


def sample_expression(rng: random.Random, difficulty: Difficulty) -> str:
    """Draw one expression, for example ``-48 + (8 - (3 + 2 - -4))``.

    Args:
      rng: source of randomness; its state alone decides the result.
      difficulty: entropy, number of operands and limits.

    Returns:
      The text, with the fewest brackets in which a sum keeps its structure: a difference inside a sum is bracketed, and
      so is everything that is subtracted; sums of sums are written flat.

    Raises:
      ValueError: no expression within `max_operand` turned up in a million tries.

    Example:
      >>> sample_expression(random.Random(2), Difficulty(entropy=(8, 8), operands=(4,)))
      '47 - (22 + -4 - -68)'
    """
    for _ in range(_MAX_TRIES):
        entropy = rng.uniform(*difficulty.entropy)
        operands = rng.choice(difficulty.operands)
        value_entropy = max(1.0, difficulty.value_share * entropy)
        budget = max(0.0, entropy - value_entropy + _log10_catalan(operands - 1) + difficulty.tree_offset)
        tree = _split(rng, _draw(rng, value_entropy), operands, budget)
        if difficulty.max_operand is None or _largest(tree) <= difficulty.max_operand:
            return _render(tree)
    raise ValueError(
        f"sample_expression: no expression with operands up to {difficulty.max_operand} in {_MAX_TRIES:,} tries at "
        f"entropy {difficulty.entropy}; raise max_operand or lower the entropy."
    )


def split_of(expression: str) -> str:
    """Name the split that an expression belongs to: a hash of its text decides, whatever the seed or the sizes.

        bucket = blake2b(text) mod 16;  0: interpolate, 1: longer, 2..15: train

    So two splits share no expression, under any template, in any pair of runs.

    Example:
      >>> split_of("1 + 2"), split_of("3 - 4")
      ('train', 'interpolate')
    """
    digest = hashlib.blake2b(expression.encode("ascii"), digest_size=8).digest()
    return _SPLIT_OF_BUCKET[int.from_bytes(digest, "big") % _BUCKETS]


def evaluate(expression: str) -> int:
    """Evaluate integers joined by + and -, with brackets and signs, exactly and in linear time.

    Shares nothing with the generator: it works on the text alone, so it can check it.

    Raises:
      ValueError: anything else in the text, with the position.

    Example:
      >>> evaluate("-48 + (8 - (-12 + (3 + 2 - -4)))")
      -37
    """
    signs = [1]  # sign of everything inside the brackets that are open, outermost first
    total, sign, wants_operand, position, end = 0, 1, True, 0, len(expression.rstrip(" "))
    while position < end:
        match = _TOKEN.match(expression, position)
        if match is None:
            excerpt = expression[position : position + 20]
            raise ValueError(f"evaluate: {excerpt!r} at position {position} is neither a number, a sign nor a bracket.")
        token, position = match.group(1), match.end()
        if wants_operand and token in "+-":
            sign = -sign if token == "-" else sign
        elif wants_operand and token == "(":
            signs.append(signs[-1] * sign)
            sign = 1
        elif wants_operand and token != ")":
            total += signs[-1] * sign * int(token)
            wants_operand = False
        elif not wants_operand and token in "+-":
            sign, wants_operand = (-1 if token == "-" else 1), True
        elif not wants_operand and token == ")" and len(signs) > 1:
            signs.pop()
        else:
            raise ValueError(f"evaluate: unexpected {token!r} before position {position} of {expression[:80]!r}.")
    if wants_operand or len(signs) > 1:
        raise ValueError(f"evaluate: {expression[:80]!r} ends too early.")
    return total


def _log10_catalan(n: int) -> float:
    return math.log10(math.comb(2 * n, n) // (n + 1))


def _draw(rng: random.Random, entropy: float) -> int:
    half = math.ceil(10.0**entropy / 2)
    return rng.randint(-half, half)


def _split(rng: random.Random, value: int, leaves: int, budget: float) -> Tree:
    if leaves == 1:
        return value
    left_leaves = rng.randint(1, leaves - 1)
    entropy = budget / (leaves - 1)
    operator, drawn = rng.choice("+-"), _draw(rng, entropy)
    if rng.random() < 0.5:
        left, right = drawn, (value - drawn if operator == "+" else drawn - value)
    else:
        left, right = (value - drawn if operator == "+" else value + drawn), drawn
    left_splits, right_splits = left_leaves - 1, leaves - left_leaves - 1
    share = rng.betavariate(left_splits, right_splits) if left_splits and right_splits else float(left_splits > 0)
    rest = budget - entropy
    return (
        operator,
        _split(rng, left, left_leaves, rest * share),
        _split(rng, right, leaves - left_leaves, rest * (1 - share)),
    )


def _largest(tree: Tree) -> int:
    return abs(tree) if isinstance(tree, int) else max(_largest(tree[1]), _largest(tree[2]))


def _render(tree: Tree, parent: str = "", is_right: bool = False) -> str:
    if isinstance(tree, int):
        return str(tree)
    operator = tree[0]
    text = f"{_render(tree[1], operator)} {operator} {_render(tree[2], operator, True)}"
    return f"({text})" if (parent == "+" and operator == "-") or (parent == "-" and is_right) else text
