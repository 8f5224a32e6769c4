"""Rows of LOSSES that read whole numbers: runs of any length, what ends a run, packed samples."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from smmd_jax import LOSSES, ntil_loss, ntil_terms
from tests.cases import (
    SEQUENCE_ROWS,
    certain_logits,
    evaluate,
    make_batch,
    make_kernel,
    make_numbers_of,
    make_vocab,
    terms_of,
    text_ids,
)
from tests.reference import REFERENCES

every_sequence_row = pytest.mark.parametrize("row", SEQUENCE_ROWS)
LENGTH = 130


def targets_of(text):
    """Targets [1, 130]: the digits of a text, a token of text for any other character, and text to the end."""
    ids, other = np.asarray(make_vocab(10).token_ids), int(text_ids(make_vocab(10))[0])
    return np.array([[int(ids[int(char)]) if char.isdigit() else other for char in text.ljust(LENGTH)]], np.int32)


def random_logits(seed):
    return make_batch(make_vocab(10), (1, LENGTH), seed)[0]


def assert_follows(row, value, logits, targets, **options):
    wanted = REFERENCES[row].value(logits, targets, make_numbers_of(make_kernel(row), terms_of(row)), **options)
    # numbers that agree in their first seven digits differ by less than float32 can tell
    np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=1e-7)


TEXTS = ["7", "0", "000", "10", "12.34", "a1b22c333", "no number", "1" * 41, "9" * 120, "0" * 50 + "7", "8" * LENGTH]


@every_sequence_row
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:9])
def test_numbers_of_any_length_follow_the_formula(row, text):
    for seed in range(3):
        logits, targets = random_logits(seed), targets_of(text)
        value, gradient = evaluate(row, logits, targets)
        assert_follows(row, value, logits, targets)
        chex.assert_tree_all_finite(gradient)


NEIGHBOURS = [
    ("1000", "0999"),
    ("0999", "1000"),
    ("100000000000", "099999999999"),
    ("0", "9"),
    ("10", "00"),
    ("00", "10"),
]


@every_sequence_row
@pytest.mark.parametrize(("said", "wanted"), NEIGHBOURS)
def test_certain_numbers_with_no_digit_in_common(row, said, wanted):
    logits, targets = certain_logits(targets_of(said)), targets_of(wanted)
    assert_follows(row, evaluate(row, logits, targets)[0], logits, targets)


@pytest.mark.parametrize("row", [row for row in SEQUENCE_ROWS if REFERENCES[row].gradient is not None])
def test_a_number_said_right_but_not_for_certain_is_pulled_by_its_digits_alone(row):
    """|X - Y| has no slope at X = Y, where the derivative of an absolute value is a choice."""
    targets = targets_of("407x35")
    logits = random_logits(0)
    # so little ahead that the softmax at temperature 0.1 is not yet one-hot
    np.put_along_axis(logits, targets[..., None], logits.max(axis=-1, keepdims=True) + 0.05, axis=-1)
    numbers = make_numbers_of(make_kernel(row), terms_of(row))
    wanted = REFERENCES[row].gradient(logits, targets, numbers)
    np.testing.assert_allclose(evaluate(row, logits, targets)[1], wanted, atol=2e-5 * np.abs(wanted).max())


@functools.partial(jax.jit, static_argnums=0)
def values_of(function, logits, targets, kernel, mask, segment_ids):
    return function(logits, targets, kernel, mask=mask, segment_ids=segment_ids)


@hypothesis.given(
    text=st.text("0123456789x", min_size=12, max_size=12),
    seed=st.integers(0, 999),
    masked=st.sets(st.integers(0, 11), max_size=6),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
@every_sequence_row
def test_masks_and_segments_end_numbers_and_samples_are_averaged(row, text, seed, masked, lengths):
    logits, targets = random_logits(seed), targets_of(text)
    mask = ~np.isin(np.arange(LENGTH), list(masked))[None]
    segment_ids = np.zeros((1, LENGTH), np.int32)
    segment_ids[0, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    value = values_of(LOSSES[row].function, logits, targets, make_kernel(row), mask, segment_ids)
    assert_follows(row, value, logits, targets, mask=mask, segment_ids=segment_ids)


@every_sequence_row
def test_packing_two_samples_in_a_row_gives_the_mean_of_both(row):
    alone = [evaluate(row, random_logits(seed), targets_of("x42"))[0] for seed in range(2)]
    logits = np.concatenate([random_logits(0)[:, :3], random_logits(1)[:, :3], random_logits(2)[:, 6:]], axis=1)
    targets, segment_ids = targets_of("x42x42"), np.array([[1] * 3 + [2] * 3 + [0] * (LENGTH - 6)], np.int32)
    mask = np.ones((1, LENGTH), bool)
    value = values_of(LOSSES[row].function, logits, targets, make_kernel(row), mask, segment_ids)
    np.testing.assert_allclose(value, (alone[0] + alone[1]) / 2, rtol=1e-6)


@every_sequence_row
@pytest.mark.parametrize("segment_ids", [np.ones(5, int), np.ones((2, 5), np.float32)], ids=["shape", "dtype"])
def test_segment_ids_of_another_shape_or_type_are_refused(row, segment_ids):
    logits, targets = make_batch(make_vocab(10))
    with pytest.raises((ValueError, TypeError), match="segment_ids"):
        LOSSES[row].function(logits, targets, make_kernel(row), segment_ids=segment_ids)


@pytest.mark.slow
@every_sequence_row
def test_segment_ids_of_64_bits_stay_apart(row):
    """Cut to 32 bits, the second would be padding and the third the first."""
    short = np.array([[1] * 3 + [2] * 3 + [1] * 3 + [0] * (LENGTH - 9)], np.int32)
    logits, targets, mask = random_logits(0), targets_of("x42042942"), np.ones((1, LENGTH), bool)
    wide = np.choose(short, [0, 5, 2**32]).astype(np.int64)
    wide[0, 6:9] = 5 + 2**32
    kernel = make_kernel(row)
    found = LOSSES[row].function(logits, targets, kernel, mask=mask, segment_ids=wide)
    np.testing.assert_array_equal(found, LOSSES[row].function(logits, targets, kernel, mask=mask, segment_ids=short))


def test_errors_name_the_function_that_was_called():
    logits, targets = make_batch(make_vocab(9))
    for function in (ntil_loss, ntil_terms):
        for call in (
            lambda function=function: function(logits, targets, make_kernel(size=9)),
            lambda function=function: function(logits[0, 0], targets[0, 0], make_kernel()),
            lambda function=function: function(logits, targets[0], make_kernel()),
        ):
            with pytest.raises(ValueError) as caught:
                call()
            assert str(caught.value).startswith(f"{function.__name__}:")


@every_sequence_row
def test_a_single_position_is_refused(row):
    with pytest.raises(ValueError, match="T"):
        LOSSES[row].function(np.zeros(16, np.float32), np.int32(3), make_kernel(row))


@every_sequence_row
@pytest.mark.parametrize("size", [9, 11])
def test_a_vocabulary_that_is_not_the_ten_digits_is_refused(row, size):
    logits, targets = make_batch(make_vocab(size))
    with pytest.raises(ValueError, match=rf"\b{size}\b"):
        LOSSES[row].function(logits, targets, make_kernel(row, size))
