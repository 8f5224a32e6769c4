"""Numbers in text, exactly: a text that is one number, the last number of a text, and the number after a mark."""

import collections
import re
from fractions import Fraction

# Far above any answer of the tasks (30 characters), and low enough that nothing a model writes costs time or memory.
MAX_NUMBER_CHARACTERS = 64

# Signed integer, decimal with digits on both sides of the point, or fraction. ASCII only, and every part is anchored on
# digits, so matching is linear. No exponent, comma, blank, "nan" or "inf".
_NUMBER = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]+)(?:\.(?P<decimals>[0-9]+)|/(?P<denominator>[0-9]+))?", re.ASCII)

# What a float is in text, without nan, inf, underscores and digits of other scripts.
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]+))?", re.ASCII)

# Digits and all that may join digits; what is well formed is decided of the whole run, so that of a malformed one no
# part passes for a number. Quantifiers are possessive: a run is read once.
_GROUP = r"(?:,\\!|\{,\}|\\,|,)"  # 9,500 and the ways in which LaTeX writes it
_RUN = re.compile(rf"[0-9]++(?:(?:{_GROUP}|[./])[0-9]++)*+(?:[eE][+-]?[0-9]++)?+", re.ASCII)
_WELL_FORMED = re.compile(
    rf"(?P<whole>[0-9]{{1,3}}(?:{_GROUP}[0-9]{{3}})+|[0-9]+)"
    r"(?:(?:\.(?P<decimals>[0-9]+))?(?:[eE](?P<exponent>[+-]?[0-9]+))?|/(?P<denominator>[0-9]+))",
    re.ASCII,
)
_MINUS = "-\u2212"
CURRENCY = "$\u20ac\u00a3\u00a5"
_MARK = "####"
_PIECE = 2**14
_RECENT = 64
# After the mark: blanks, then a sign and a currency in either order, as in -$3 and $-3.
_AFTER_MARK = re.compile(rf"[ \t]*(?:[{_MINUS}+]?\\?[{CURRENCY}]?|\\?[{CURRENCY}][{_MINUS}+])(?=[0-9]|\.[0-9])")


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
    magnitude = _magnitude(match["whole"], match["decimals"], match["denominator"])
    return -magnitude if magnitude and match["sign"] == "-" else magnitude


def parse_float(text: str) -> Fraction | None:
    """Read a text that is one floating-point literal and nothing else: 14.7, -.5, 3. and 1e3, not nan or 1_000.

    Example:
      >>> parse_float("1e3"), parse_float("1,931"), parse_float("inf")
      (Fraction(1000, 1), None, None)
    """
    text = text.strip()
    match = _FLOAT.fullmatch(text) if len(text) <= MAX_NUMBER_CHARACTERS else None
    if match is None or _is_far(match["exponent"]):
        return None
    return Fraction(text)


def parse_grouped(text: str) -> Fraction | None:
    """Read a text that is one number and nothing else, thousands commas, a currency and a sign before it allowed.

    Example:
      >>> parse_grouped("-$1,250.50"), parse_grouped("51.0"), parse_grouped("12,34")
      (Fraction(-2501, 2), Fraction(51, 1), None)
    """
    text = text.strip()
    match = _AFTER_MARK.match(text)
    run = _RUN.search(text, match.end()) if match else None
    return _value(text, run) if run and run.end() == len(text) else None


def last_number(text: str) -> Fraction | None:
    """Find the last well-formed number of a text.

        number = [sign] (digits | 1-3 digits {"," 3 digits}) ["." digits] [exponent]    or    [sign] digits "/" digits

    A run of digits joined by points, commas or slashes is a number as a whole or not at all: 1,00 and 1.2.3 are none,
    and neither is any part of them. A minus (also U+2212) is a sign unless a digit or letter stands before it, so 5-3
    ends in 3; a currency may stand between sign and digits. ".5" is 0.5 where no letter, digit or point precedes it.
    LaTeX's 9{,}500, 9\\,500 and 9,\\!500 are 9500. Linear in the text.

    Example:
      >>> last_number("So the total is $29.00."), last_number("from 5-3"), last_number("70,000 in all")
      (Fraction(29, 1), Fraction(3, 1), Fraction(70000, 1))
    """
    end = len(text)
    while end > 0:
        # Piece by piece from the end, cut at blanks, which no run holds.
        start = text.rfind(" ", 0, max(end - _PIECE, 0)) + 1
        if (value := _last_value(text, start, end)) is not None:
            return value
        end = start - 1
    return None


def number_after_mark(text: str) -> Fraction | None:
    """Find the number that follows the last ``####`` of a text, where GSM8K's solutions put their answer.

    Blanks after the mark, a currency and a sign are passed over; whatever follows the number is ignored.

    Example:
      >>> number_after_mark("2+2=4\\n#### 4 apples"), number_after_mark("####$1,200"), number_after_mark("4")
      (Fraction(4, 1), Fraction(1200, 1), None)
    """
    place = text.rfind(_MARK)
    match = _AFTER_MARK.match(text, place + len(_MARK)) if place >= 0 else None
    run = _RUN.search(text, match.end()) if match else None
    return _value(text, run) if run else None


def has_mark(text: str) -> bool:
    """Say whether a text has the ``####`` before an answer."""
    return _MARK in text


def _last_value(text: str, start: int, end: int) -> Fraction | None:
    """The last number of a piece; most runs are numbers, so the last few are tried before all."""
    recent = collections.deque(_RUN.finditer(text, start, end), maxlen=_RECENT)
    value = next((value for run in reversed(recent) if (value := _value(text, run)) is not None), None)
    if value is None and len(recent) == _RECENT:
        for run in _RUN.finditer(text, start, end):
            value = found if (found := _value(text, run)) is not None else value
    return value


def _value(text: str, run: re.Match[str]) -> Fraction | None:
    start, end = run.span()
    match = _WELL_FORMED.fullmatch(text, start, end) if end - start <= MAX_NUMBER_CHARACTERS else None
    if match is None or _is_far(match["exponent"]):
        return None
    whole = re.sub(r"[^0-9]", "", match["whole"])
    magnitude = _magnitude(whole, match["decimals"], match["denominator"])
    if magnitude is None:
        return None
    if text[start - 1 : start] == "." and not _is_alphanumeric(text, start - 2) and text[start - 2 : start - 1] != ".":
        if match["decimals"] or match["denominator"] or len(whole) != len(match["whole"]):
            return None
        magnitude, start = magnitude / 10 ** len(whole), start - 1
    magnitude *= Fraction(10) ** int(match["exponent"] or 0)
    return -magnitude if magnitude and _is_negative(text, start) else magnitude


def _is_negative(text: str, start: int) -> bool:
    """Whether a minus stands before the digits at `start`, a currency between or around it aside."""
    place = start - 1
    if place >= 0 and text[place] in CURRENCY:
        place -= 2 if text[max(place - 1, 0)] == "\\" else 1
    return place >= 0 and text[place] in _MINUS and not _is_alphanumeric(text, place - 1)


def _is_alphanumeric(text: str, place: int) -> bool:
    return place >= 0 and text[place].isalnum()


def _magnitude(whole: str, decimals: str | None, denominator: str | None) -> Fraction | None:
    bottom, decimals = int(denominator or 1), decimals or ""
    return Fraction(int(whole + decimals), bottom * 10 ** len(decimals)) if bottom else None


def _is_far(exponent: str | None) -> bool:
    """Whether a power of ten is beyond what is called a number here: 1e999999999 would fill the memory."""
    return exponent is not None and (len(exponent) > 4 or abs(int(exponent)) > MAX_NUMBER_CHARACTERS)
