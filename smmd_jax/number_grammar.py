"""Which texts are numbers: the policies' grammars over ASCII bytes, and words for why a text is none."""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Policy(NamedTuple):
    """One rule for what counts as a number: the ASCII grammar of the whole token, and whether max_value bounds it."""

    grammar: re.Pattern[bytes]
    bounded: bool


# On bytes: on text `\d` and str.isdigit() accept the digits of every script, and float() accepts nan and 1_000.
POLICIES: dict[str, Policy] = {
    "digits": Policy(re.compile(rb"[0-9]"), bounded=False),
    "integers": Policy(re.compile(rb"0|[1-9][0-9]*"), bounded=True),
    "all_integers": Policy(re.compile(rb"[0-9]+"), bounded=True),
    "float": Policy(re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"), bounded=False),
}

OTHER_TEXT = "not a number"
_ABOVE_MAX = "above max_value"
_NOT_FINITE = "not finite in float32"

_MAX_INTEGER_DIGITS = 39  # of the largest float32; checked first, so that a token of a million digits costs nothing


def _is_numeral_beyond_ascii(text: bytes) -> object:
    if text.isascii():
        return False
    characters = text.decode("utf-8", "replace").strip()
    return characters and all(unicodedata.numeric(character, None) is not None for character in characters)


# Most tokens hold nothing of a number: one search spares them the table below.
_SOMETHING_OF_A_NUMBER = re.compile(rb"[0-9\x80-\xff]|nan|inf", re.IGNORECASE)

# Why a text with something of a number in it is not one; the first that holds is reported. The order matters.
_DIGITS = rb"[0-9]+(?:_[0-9]+)*"
_REASONS: tuple[tuple[str, Callable[[bytes], object]], ...] = (
    ("nan or infinity", re.compile(rb"\s*[+-]?(?:nan|inf|infinity)\s*", re.IGNORECASE).fullmatch),
    ("leading zero", re.compile(rb"0[0-9]+").fullmatch),
    ("more than one digit", POLICIES["all_integers"].grammar.fullmatch),
    ("sign or fraction", POLICIES["float"].grammar.fullmatch),
    ("blank around the number", lambda text: POLICIES["float"].grammar.fullmatch(text.strip())),
    (
        "underscore, exponent or open decimal point",
        re.compile(rb"[+-]?(?:%b(?:\.(?:%b)?)?|\.%b)(?:[eE][+-]?%b)?" % ((_DIGITS,) * 4)).fullmatch,
    ),
    ("numeral outside ASCII", _is_numeral_beyond_ascii),
)


def parse_number(text: bytes, policy: Policy, max_value: int) -> float | str:
    """Give the value of a token's text in float32 precision, or the reason why it is no number under the policy.

    Args:
      text: the whole text of a token.
      policy: a row of POLICIES.
      max_value: largest value of a bounded policy.

    Returns:
      A finite float, or a reason in a few words.

    Example:
      >>> parse_number(b"12", POLICIES["integers"], 999), parse_number(b"1_0", POLICIES["float"], 999)
      (12.0, 'underscore, exponent or open decimal point')
    """
    if not policy.grammar.fullmatch(text):
        if not _SOMETHING_OF_A_NUMBER.search(text):
            return OTHER_TEXT
        return next((reason for reason, holds in _REASONS if holds(text)), OTHER_TEXT)
    integer_digits = text.lstrip(b"+-").partition(b".")[0].lstrip(b"0")
    if len(integer_digits) > _MAX_INTEGER_DIGITS:
        return _ABOVE_MAX if policy.bounded and max_value < 10**_MAX_INTEGER_DIGITS else _NOT_FINITE
    if policy.bounded and int(integer_digits or b"0") > max_value:
        return _ABOVE_MAX
    with np.errstate(over="ignore"):
        value = float(np.float32(float(text)))
    return value + 0.0 if np.isfinite(value) else _NOT_FINITE  # + 0.0 turns -0.0 into 0.0
