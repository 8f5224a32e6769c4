"""Regression-aware answers of one token: the mean or the median of the distribution over numbers after a prompt."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from smmd_jax import NumericVocab
from train.exits import DataError
from train.prompts import PromptBatch
from train.regression_decoding import expected_value, median_value
from train.sampled_answers import number_text
from train.tasks.base import Example
from train.tokenizer import Tokenizer

# How a distribution over the numeric tokens becomes one number: --decode, beside those that draw answers.
TOKEN_DECODINGS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"token_expected_value": expected_value, "token_median": median_value}
)


def check_single_tokens(
    examples: Iterable[Example], tokenizer: Tokenizer, vocab: NumericVocab, *, decode: str
) -> None:
    """Refuse gold answers that are not one numeric token each: the number after the prompt would be part of an answer.

    Raises:
      DataError: with the number of such answers and the first of them; also an example with an image.
    """
    known, total = set(np.asarray(vocab.token_ids).tolist()), 0
    other = []
    for example in examples:
        if example.image is not None:
            raise DataError(f"decode={decode} reads prompts of text alone, and example {example.key} has an image.")
        total += 1
        tokens = tokenizer.encode(example.answer)
        if len(tokens) != 1 or tokens[0] not in known:
            other.append(example)
    if other:
        raise DataError(
            f"decode={decode} answers with the value of one token, and {len(other):,} of {total:,} gold answers are "
            f"not one numeric token (example {other[0].key}: {other[0].answer[:40]!r}): use --decode={decode[6:]}, "
            "which draws whole answers, or a --numeric_policy and tokenizer that have them."
        )


def token_answers(
    model: nnx.Module, batches: Iterable[PromptBatch], vocab: NumericVocab, *, decode: str
) -> list[tuple[Example, str]]:
    """Answer every prompt with one number, from the softmax over the numeric tokens at the next position.

        q = softmax(logits of the numeric tokens)
        token_expected_value: sum_i q_i v_i        token_median: the median of q

    Args:
      model: a backbone: `hidden` and `numeric_logits`.
      batches: from `make_prompt_batches`, padded on the left.
      vocab: the numeric tokens.
      decode: a key of TOKEN_DECODINGS.

    Returns:
      (example, text of the number, at most twelve decimals).

    References:
      Lukasik, Narasimhan, Menon, Yu, Kumar, "Regression-aware Inference with LLMs", 2024, section 3.
    """

    @nnx.jit
    def probabilities(model, ids, mask):
        scores = model.numeric_logits(model.hidden(ids, attention_mask=mask)[:, -1], vocab)
        return jax.nn.softmax(scores, axis=-1)

    answers: list[tuple[Example, str]] = []
    for batch in batches:
        p = np.asarray(probabilities(model, batch.input_ids, batch.attention_mask), np.float64)
        numbers: Sequence[float] = TOKEN_DECODINGS[decode](p[: len(batch.examples)], vocab.values).tolist()
        answers += zip(batch.examples, (number_text(Fraction(number)) for number in numbers), strict=True)
    return answers
