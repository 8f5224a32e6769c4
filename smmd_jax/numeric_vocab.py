"""Which tokens are numbers, and which number each of them is: one rule, one place."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from smmd_jax.errors import TokenizerError, TokenRangeError
from smmd_jax.number_grammar import OTHER_TEXT, POLICIES, parse_number
from smmd_jax.scalars import as_integer
from smmd_jax.tokenizer_pieces import Piece, read_pieces

DEFAULT_MAX_VALUE = 999
_LARGEST_EXACT = 2**24  # integers beyond it are rounded in float32

_EXCLUDED = "in exclude_ids"
_NO_TEXT = "no text"

_EXAMPLES = 5
_EXAMPLE_LENGTH = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabReport:
    """What a numeric vocabulary holds and what was left out of it, for people: `print` it.

    Attributes:
      policy: the rule used, a key of POLICIES.
      max_value: the bound of the integer policies.
      tokens_seen: how many tokens were looked at; `count` and the counts of `left_out` add up to it.
      count: N, how many of them are numbers.
      smallest_value: smallest of the values.
      largest_value: largest of the values.
      distinct_values: how many different values the N tokens have.
      duplicates: (value, texts of its tokens) for each value that more than one token has.
      left_out: (reason, how many tokens, the first few of them), plain text last.
      notes: sentences that a user should read.
    """

    policy: str
    max_value: int
    tokens_seen: int
    count: int
    smallest_value: float
    largest_value: float
    distinct_values: int
    duplicates: tuple[tuple[float, tuple[str, ...]], ...]
    left_out: tuple[tuple[str, int, tuple[str, ...]], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        bound = f", max_value {self.max_value}" if POLICIES[self.policy].bounded else ""
        shown = [f"{value:.9g} ({_quote(tokens)})" for value, tokens in self.duplicates[:_EXAMPLES]]
        more = len(self.duplicates) - len(shown)
        lines = [
            f"{self.count} numeric of {self.tokens_seen} tokens (policy {self.policy!r}{bound})",
            f"  values: {self.smallest_value:.9g} to {self.largest_value:.9g}, {self.distinct_values} distinct",
            f"  duplicates: {', '.join(shown) or 'none'}{f' and {more} more' if more else ''}",
        ]
        lines += [f"  left out: {count} {reason}: {_quote(tokens, count)}" for reason, count, tokens in self.left_out]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NumericVocab:
    """Hold the N tokens that are numbers, ordered by value (ties by token id).

    A frozen pytree: the arrays are its leaves, the rest is static and hashable. Printing it gives the report.

    Attributes:
      token_ids: the tokens' ids, int32 `[N]`.
      values: their values, float32 `[N]`, ascending. Equal values stand side by side.
      policy: the rule that chose them, a key of POLICIES.
      min_vocab_size: largest id + 1: the least width of a head that holds them all.
      report: N, range, duplicates, what was left out and why.

    Example:
      >>> vocab = make_numeric_vocab(["0", "1", "2", "x"])
      >>> jax.jit(lambda vocab, logits: logits[vocab.token_ids])(vocab, jnp.arange(4.0)).tolist()
      [0.0, 1.0, 2.0]
    """

    # Any: inside jax a leaf may be a shape, a sharding or a batch, and a type checker at run time would refuse those.
    token_ids: Int[Array, "N"] | Any
    values: Float[Array, "N"] | Any
    policy: str = dataclasses.field(metadata={"static": True})
    min_vocab_size: int = dataclasses.field(metadata={"static": True})
    report: VocabReport = dataclasses.field(metadata={"static": True})

    @property
    def vocab(self) -> "NumericVocab":
        """Itself: what needs only ids and values takes a NumericVocab and a NumericKernel alike."""
        return self

    def __repr__(self) -> str:
        return f"NumericVocab: {self.report}"


def make_numeric_vocab(
    tokens: Mapping[str | bytes, int] | Sequence[str | bytes | None],
    *,
    policy: str = "integers",
    max_value: int = DEFAULT_MAX_VALUE,
    exclude_ids: Iterable[int] = (),
) -> NumericVocab:
    """Choose the tokens whose whole text is a number.

        V_num = {(id, value(text)) : text matches the grammar of the policy}          ordered by (value, id)

    Policies, all of them on ASCII bytes, on the whole text, finite in float32, without any blank:

    - "digits": one digit. Those of 0-9 that exist.
    - "integers": 0..max_value as they are usually written, without sign or leading zero.
    - "all_integers": also with leading zeros ("007", "00"). Tokens then share values, which makes the kernel singular.
    - "float": decimals: optional sign, digits, optional fraction (".5" too, "5." not); no exponent, no bound.

    Never a number: nan, inf, 1_000, 1e5, digits of other scripts, superscripts, fractions such as U+00BD.

    The value is that of the token, not of its place in a longer number: where a tokenizer cuts "1234" into "123|4", the
    tokens "123" and "124" are 1 apart here although they stand for 10 in the text.

    Args:
      tokens: {decoded text: id} or a sequence of decoded texts whose position is the id (None: no text there).
        Decoded means that a blank is a blank: raw vocabulary entries such as U+0120 + "7" are not numbers.
      policy: one of the four above.
      max_value: largest integer of "integers" and "all_integers"; at most 2**24 is exact in float32.
      exclude_ids: ids to leave out whatever their text, such as special tokens.

    Returns:
      The numeric vocabulary; N = 1 is allowed and noted in its report.

    Raises:
      TokenizerError: no token is a number.
      TokenRangeError: an id is negative or does not fit int32.
      ValueError: unknown policy, negative max_value, or one id for two tokens.
      TypeError: a token that is neither str nor bytes, or an id, max_value or exclude_ids that are not integers.

    Example:
      >>> vocab = make_numeric_vocab({"7": 0, "x": 1, "12": 5, "07": 3})
      >>> vocab.token_ids.tolist(), vocab.values.tolist(), vocab.min_vocab_size
      ([0, 5], [7.0, 12.0], 6)
      >>> print(vocab)
      NumericVocab: 2 numeric of 4 tokens (policy 'integers', max_value 999)
        values: 7 to 12, 2 distinct
        duplicates: none
        left out: 1 leading zero: '07'
        left out: 1 not a number: 'x'

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, Algorithm 1, which parses
      with float(); the released code keeps the canonical integers 0..999, our default.
    """
    max_value = _checked_rule(policy, max_value)
    excluded = _integers(exclude_ids, "exclude_ids")
    pieces = _given_pieces(tokens)
    unused = len(excluded - {piece.token_id for piece in pieces})
    notes = [f"{unused} of exclude_ids belong to no token"] if unused else []
    pieces = [p._replace(left_out=_EXCLUDED) if p.token_id in excluded else p for p in pieces]
    return _select(pieces, policy, max_value, notes)


def numeric_vocab_from_tokenizer(
    tokenizer: str | os.PathLike | object,
    *,
    policy: str = "integers",
    max_value: int = DEFAULT_MAX_VALUE,
    vocab_size: int | None = None,
) -> NumericVocab:
    """Choose the tokens of a tokenizer whose whole text is a number.

    As `make_numeric_vocab`, on the bytes each id stands for. Special tokens, added tokens and byte-fallback pieces are
    never numbers, whatever they look like. Nor are pieces that carry their neighbourhood with them: SentencePiece's
    U+2581 + "5" is " 5", with a blank; WordPiece's "##5" is a digit only after another piece and would double the value
    of "5". So a WordPiece tokenizer gets the numeric loss on the first piece of a number only. The report counts what
    was left out, by reason.

    Args:
      tokenizer: path to a tokenizer.json or tekken.json or to a folder that holds one, a `tokenizers.Tokenizer`, or a
        Hugging Face fast tokenizer. It is read, never changed.
      policy: as in `make_numeric_vocab`.
      max_value: as in `make_numeric_vocab`.
      vocab_size: width of the model's head, if known; wider than the tokenizer is fine.

    Returns:
      The numeric vocabulary.

    Raises:
      TokenizerError: missing file, not a tokenizer, no numeric token, or only one number (its losses would all be 0).
      TokenRangeError: a numeric token does not fit a head of width vocab_size.
      ValueError: unknown policy, negative max_value, vocab_size below 1.
      TypeError: an object without a readable token table, or a vocab_size that is not an integer.

    Example:
      >>> from tokenizers import Tokenizer, models
      >>> tokenizer = Tokenizer(models.WordLevel({"one": 0, "8": 1, "3": 2}, unk_token="one"))
      >>> numeric_vocab_from_tokenizer(tokenizer, vocab_size=64).token_ids.tolist()
      [2, 1]
    """
    max_value = _checked_rule(policy, max_value)
    if vocab_size is not None:
        vocab_size = _checked_integer(vocab_size, "vocab_size", "the width of the model's head", least=1)
    pieces = read_pieces(tokenizer)
    tokenizer_size = max((piece.token_id for piece in pieces), default=-1) + 1
    narrow = vocab_size is not None and vocab_size < tokenizer_size
    notes = [f"the head's width {vocab_size} is less than the tokenizer's {tokenizer_size} ids"] if narrow else []
    vocab = _select(pieces, policy, max_value, notes)
    if vocab.report.distinct_values == 1:
        raise TokenizerError(
            f"the tokenizer has one number only ({vocab.report.smallest_value:.9g}) among {len(pieces)} tokens under "
            f"policy {policy!r}: a loss between distributions over one value is always 0; use another policy or "
            "another tokenizer"
        )
    if vocab_size is not None and vocab.min_vocab_size > vocab_size:
        raise TokenRangeError(
            f"numeric token id {vocab.min_vocab_size - 1} does not fit a head of width {vocab_size}: it needs at least "
            f"{vocab.min_vocab_size} columns; resize the model's embedding or use the tokenizer it was trained with"
        )
    return vocab


def _checked_integer(value: object, name: str, meaning: str, *, least: int) -> int:
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: wanted an integer, {meaning}")
    if number < least:
        raise ValueError(f"{name} is {number}: wanted at least {least}, {meaning}")
    return number


def _checked_rule(policy: object, max_value: object) -> int:
    """The largest number, an integer."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: the known ones are {', '.join(POLICIES)}")
    return _checked_integer(max_value, "max_value", "the largest number of the integer policies", least=0)


def _integers(ids: Iterable[int], name: str) -> set[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} is {ids!r}: wanted integers, such as tokenizer.all_special_ids")
    try:
        ids = list(ids)
    except TypeError:  # an array without an axis
        raise TypeError(f"{name} is {ids!r}: wanted several integers, such as tokenizer.all_special_ids") from None
    return {_checked_integer(token_id, f"an entry of {name}", "a token id", least=0) for token_id in ids}


def _given_pieces(tokens: object) -> list[Piece]:
    """Turn the argument of make_numeric_vocab into pieces ordered by id, each id once."""
    if isinstance(tokens, Mapping):
        items = list(tokens.items())
    elif isinstance(tokens, Sequence) and not isinstance(tokens, str | bytes | bytearray):
        items = [(token, token_id) for token_id, token in enumerate(tokens)]
    else:
        raise TypeError(
            f"tokens is a {type(tokens).__name__}: wanted {{decoded text: id}} or a sequence of decoded texts by id"
        )
    pieces: dict[int, Piece] = {}
    for token, token_id in items:
        if token is not None and not isinstance(token, str | bytes):
            raise TypeError(f"token {token!r} with id {token_id!r} is a {type(token).__name__}: wanted str or bytes")
        text = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else token or b""
        given, token_id = token_id, as_integer(token_id)
        if token_id is None:
            kind = type(given).__name__
            raise TypeError(f"the id of token {_show(text)!r} is {given!r}, a {kind}: wanted an integer")
        if not 0 <= token_id < 2**31:
            raise TokenRangeError(f"the id of token {_show(text)!r} is {token_id}: wanted 0 <= id < 2**31")
        if token_id in pieces:
            both = f"{_show(pieces[token_id].text)!r} and {_show(text)!r}"
            raise ValueError(f"id {token_id} is given to two tokens, {both}")
        pieces[token_id] = Piece(token_id, text, _NO_TEXT if token is None else None)
    return [pieces[token_id] for token_id in sorted(pieces)]


def _select(pieces: Sequence[Piece], policy: str, max_value: int, notes: list[str]) -> NumericVocab:
    numbers: list[tuple[float, int, str]] = []
    left_out: dict[str, list[bytes]] = {}
    for piece in pieces:
        found = piece.left_out or parse_number(piece.text, POLICIES[policy], max_value)
        if isinstance(found, str):
            left_out.setdefault(found, []).append(piece.text)
        else:
            numbers.append((found, piece.token_id, _show(piece.text)))
    # Plain text comes last: it is most of any tokenizer and says least.
    reasons = sorted(left_out, key=lambda reason: (reason == OTHER_TEXT, reason))
    listed = tuple((name, len(left_out[name]), tuple(map(_show, left_out[name][:_EXAMPLES]))) for name in reasons)
    if not numbers:
        close = "; ".join(f"{count} {reason}: {_quote(texts, count)}" for reason, count, texts in listed[:6])
        raise TokenizerError(
            f"none of {len(pieces)} tokens is a number under policy {policy!r} (left out: {close or 'nothing'}): pass "
            f"decoded texts with ASCII digits, another policy ({', '.join(POLICIES)}) or another tokenizer"
        )
    numbers.sort()
    by_value: dict[float, list[str]] = {}
    for value, _, text in numbers:
        by_value.setdefault(value, []).append(text)
    duplicates = tuple((value, tuple(texts)) for value, texts in by_value.items() if len(texts) > 1)
    if max_value != DEFAULT_MAX_VALUE and not POLICIES[policy].bounded:
        notes.append(f"max_value={max_value} has no effect: policy {policy!r} has no bound")
    if POLICIES[policy].bounded and numbers[-1][0] >= _LARGEST_EXACT:
        notes.append(f"integers above {_LARGEST_EXACT} are rounded to float32")
    if duplicates:
        notes.append("tokens of equal value make the kernel singular: r' K r = 0 does not imply p = q")
    if len(by_value) == 1:
        notes.append("only one value: a loss between distributions over it is always 0")
    token_ids = [token_id for _, token_id, _ in numbers]
    return NumericVocab(
        token_ids=jnp.asarray(np.array(token_ids, np.int32)),
        values=jnp.asarray(np.array([value for value, _, _ in numbers], np.float32)),
        policy=policy,
        min_vocab_size=max(token_ids) + 1,
        report=VocabReport(
            policy=policy,
            max_value=max_value,
            tokens_seen=len(pieces),
            count=len(numbers),
            smallest_value=numbers[0][0],
            largest_value=numbers[-1][0],
            distinct_values=len(by_value),
            duplicates=duplicates,
            left_out=listed,
            notes=tuple(notes),
        ),
    )


def _show(text: bytes) -> str:
    shown = text[: 4 * _EXAMPLE_LENGTH].decode("utf-8", "backslashreplace")
    return shown if len(shown) <= _EXAMPLE_LENGTH else shown[:_EXAMPLE_LENGTH] + "..."


def _quote(tokens: Sequence[str], count: int = 0) -> str:
    more = f", and {count - len(tokens)} more" if count > len(tokens) else ""
    return ", ".join(map(repr, tokens)) + more
