"""Regression-aware answers: several drawn for every prompt, and of the numbers they state the median or the mean."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from train.prompts import PromptBatch
from train.regression_decoding import mean_of_samples, median_of_samples
from train.scoring import answer_text, answer_tokens
from train.tokenizer import Tokenizer

_DECIMALS = 12

Reader = Callable[[str], Fraction | None]


def sample_answers(
    model: Any,
    tokenizer: Tokenizer,
    batches: Iterable[PromptBatch],
    *,
    max_new_tokens: int,
    samples: int,
    temperature: float,
    seed: int,
) -> list[tuple[Any, list[str]]]:
    """Draw several answers to every prompt; returns (example, texts).

    A draw depends on the seed, the example's key and its own number alone, not on the batch it stands in.

    Args:
      model: takes `train.generate.generate`'s call.
      tokenizer: decodes the answers.
      batches: from `make_prompt_batches`.
      max_new_tokens: length of an answer that does not end by itself.
      samples: answers for each prompt.
      temperature: of the draws, above 0; 1 is the model's own distribution.
      seed: of the draws.
    """
    answers = []
    for batch in batches:
        rows = [*batch.examples, *[batch.examples[-1]] * (len(batch.input_ids) - len(batch.examples))]
        codes = np.array([_code(example.key) for example in rows], np.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), codes)
        drawn = [
            answer_tokens(
                model,
                tokenizer,
                batch,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                key=jax.vmap(jax.random.fold_in, (0, None))(keys, number),
            )
            for number in range(samples)
        ]
        for row, example in enumerate(batch.examples):
            answers.append((example, [answer_text(tokenizer, tokens[row].tolist()) for tokens in drawn]))
    return answers


def median_text(texts: Sequence[str], read: Reader) -> str:
    """Give the answer whose number is the lower median of all the numbers stated; the first one where none states any.

    Args:
      texts: answers to one prompt.
      read: gives the number of a text, or None.

    Example:
      >>> from train.number_text import parse_number
      >>> median_text(["9", "seven", "1/2", "7"], parse_number)
      '7'
    """
    numbers = [read(text) for text in texts]
    median = median_of_samples(numbers)
    return texts[numbers.index(median)]


def mean_text(texts: Sequence[str], read: Reader) -> str:
    """Give the mean of all the numbers stated, as text; the first answer where none states any.

    It is rounded to twelve decimals.

    Args:
      texts: answers to one prompt.
      read: gives the number of a text, or None.

    Example:
      >>> from train.number_text import parse_number
      >>> mean_text(["2", "3"], parse_number), mean_text(["1", "1", "2"], parse_number), mean_text(["x"], parse_number)
      ('2.5', '1.333333333333', 'x')
    """
    mean = mean_of_samples(read(text) for text in texts)
    return texts[0] if mean is None else number_text(mean)


def number_text(number: Fraction) -> str:
    """Write a number out, rounded to twelve decimals.

    Example:
      >>> number_text(Fraction(-1, 3)), number_text(Fraction(40))
      ('-0.333333333333', '40')
    """
    scaled = round(number * 10**_DECIMALS)
    whole, decimals = divmod(abs(scaled), 10**_DECIMALS)
    text = f"{whole}.{decimals:0{_DECIMALS}d}".rstrip("0").rstrip(".")
    return f"-{text}" if scaled < 0 else text


# How one text is made of several: --decode, beside greedy.
DECODINGS: Mapping[str, Callable[[Sequence[str], Reader], str]] = MappingProxyType(
    {"expected_value": mean_text, "median": median_text}
)


def _code(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=4).digest(), "big")
