"""Which share of the digits of the answers each numeric policy makes a numeric target, and what it misses."""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from smmd_jax import numeric_vocab_from_tokenizer
from smmd_jax.errors import TokenizerError
from smmd_jax.numeric_vocab import POLICIES
from smmd_jax.tokenizer_pieces import read_pieces
from train.encode import EncodedExamples

_DIGIT = re.compile("[0-9]")
_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """How many digits of the answers a policy reaches.

    Attributes:
      tokens: N, tokens that are numbers under the policy.
      digits: ASCII digits of all answers.
      covered: of them, those in numeric targets.
      missed: (text of a token with digits that is no number, how many digits it holds in all), most first.
    """

    policy: str
    tokens: int
    digits: int
    covered: int
    missed: tuple[tuple[str, int], ...]

    @property
    def share(self) -> float | None:
        """Share of the digits that are covered; None where the answers have none."""
        return self.covered / self.digits if self.digits else None


def measure_coverage(
    encoded: EncodedExamples, tokenizer: object, answers: Iterable[str], *, policies: Iterable[str] = tuple(POLICIES)
) -> list[Coverage]:
    """Count, for each policy, the digits of the answers that stand in numeric targets.

        share = digits in supervised tokens of V_num / digits in the texts of the answers

    Args:
      encoded: the examples, all of them.
      tokenizer: what `numeric_vocab_from_tokenizer` takes.
      answers: the texts of their answers, in any order.
      policies: keys of POLICIES.
    """
    digits = sum(len(_DIGIT.findall(text)) for text in answers)
    pieces = {piece.token_id: piece.text for piece in read_pieces(tokenizer)}
    occurrences = np.bincount(encoded.targets[encoded.target_mask])
    held = {
        token: int(occurrences[token]) * len(_DIGIT.findall(pieces[token].decode("latin-1")))
        for token in np.flatnonzero(occurrences).tolist()
        if token in pieces
    }
    found = []
    for policy in policies:
        try:
            numeric = set(np.asarray(numeric_vocab_from_tokenizer(tokenizer, policy=policy).token_ids).tolist())
        except TokenizerError:
            numeric = set()
        missed = sorted(((n, token) for token, n in held.items() if n and token not in numeric), reverse=True)
        found.append(
            Coverage(
                policy=policy,
                tokens=len(numeric),
                digits=digits,
                covered=sum(n for token, n in held.items() if token in numeric),
                missed=tuple((pieces[token].decode("utf-8", "replace"), n) for n, token in missed),
            )
        )
    return found


def coverage_table(encoded: EncodedExamples, tokenizer: object, answers: Iterable[str]) -> str:
    """Give the coverage of every policy as text, one line each; arguments as in `measure_coverage`."""
    rows = measure_coverage(encoded, tokenizer, answers)
    if not rows[0].digits:
        return "the answers hold no digit"
    lines = [f"digits in the answers: {rows[0].digits:,}; share of them in numeric targets"]
    for row in rows:
        missed = ", ".join(f"{text!r} {count:,}" for text, count in row.missed[:_SHOWN])
        lines.append(
            f"{row.policy:<13}{row.share:7.1%}  {row.tokens:,} tokens" + (f"; missed: {missed}" if missed else "")
        )
    return "\n".join(lines)
