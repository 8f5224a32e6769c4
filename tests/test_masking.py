"""What does not count changes nothing: masks, text, targets out of range, empty axes, counts of zero."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import (
    LOSSES,
    TokenRangeError,
    check_targets,
    cross_entropy_loss,
    mean_from,
    numeric_mask,
    shift_targets,
    smmd_loss,
    sum_and_count,
)
from tests.cases import NUMERIC_ROWS, evaluate, make_batch, make_kernel, make_vocab, out_shape, text_ids, width
from tests.reference import REFERENCES

VOCAB = make_vocab(10)
LEAD = (2, 5)
MASK = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 0, 1]], bool)
POISON = {
    "nan logits, label -100": (np.nan, -100),
    "inf logits, label 2**31 - 1": (np.inf, 2**31 - 1),
    "-inf logits, label -1": (-np.inf, -1),
    "nan logits, label a number": (np.nan, int(VOCAB.token_ids[3])),
}
every_row = pytest.mark.parametrize("row", LOSSES)
every_numeric_row = pytest.mark.parametrize("row", NUMERIC_ROWS)
jit_or_eager = pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])


# masks


@every_row
@jit_or_eager
@pytest.mark.parametrize("poison", POISON)
def test_masked_positions_change_nothing_bit_for_bit(row, compiled, poison):
    score, label = POISON[poison]
    logits, targets = make_batch(VOCAB, LEAD, seed=1)
    clean = evaluate(row, logits, targets, mask=MASK, compiled=compiled)
    hidden = ~MASK
    poisoned = np.where(hidden[..., None], np.float32(score), logits), np.where(hidden, np.int32(label), targets)
    dirty = evaluate(row, *poisoned, mask=MASK, compiled=compiled)
    chex.assert_tree_all_finite(clean)
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])
    np.testing.assert_array_equal(np.asarray(dirty[1])[hidden], 0)
    if LOSSES[row].needs == "position":
        np.testing.assert_array_equal(np.asarray(dirty[0])[hidden], 0)


@every_row
def test_masked_nan_logits_make_no_nan_on_the_way(row):
    logits, targets = make_batch(VOCAB, LEAD, seed=1)
    logits[~MASK] = np.nan
    with jax.debug_nans(True):
        chex.assert_tree_all_finite(evaluate(row, logits, np.where(MASK, targets, -100).astype(np.int32), mask=MASK))


@every_row
def test_an_all_true_mask_is_no_mask(row):
    logits, targets = make_batch(VOCAB, LEAD, seed=2)
    chex.assert_trees_all_equal(
        evaluate(row, logits, targets, mask=np.ones(LEAD, bool)), evaluate(row, logits, targets)
    )


@every_row
@jit_or_eager
def test_all_masked_is_zero_with_zero_gradient(row, compiled):
    logits, targets = make_batch(VOCAB, LEAD)
    with jax.debug_nans(True):
        value, gradient = evaluate(row, logits, targets, mask=np.zeros(LEAD, bool), compiled=compiled)
    np.testing.assert_array_equal(value, np.zeros(out_shape(row, LEAD)))
    np.testing.assert_array_equal(gradient, np.zeros_like(logits))


@every_numeric_row
@jit_or_eager
def test_batch_without_numbers_is_zero_with_zero_gradient(row, compiled):
    logits, _ = make_batch(VOCAB, LEAD)
    targets = np.resize(text_ids(VOCAB), LEAD).astype(np.int32)
    with jax.debug_nans(True):
        value, gradient = evaluate(row, logits, targets, compiled=compiled)
    np.testing.assert_array_equal(value, np.zeros(out_shape(row, LEAD)))
    np.testing.assert_array_equal(gradient, np.zeros_like(logits))


@every_row
@pytest.mark.parametrize("lead", [(0, 5), (3, 0), (2, 0, 4)], ids=str)
def test_axes_of_length_zero(row, lead):
    logits, targets = np.zeros((*lead, width(VOCAB)), np.float32), np.zeros(lead, np.int32)
    value, gradient = evaluate(row, logits, targets, mask=np.zeros(lead, bool))
    np.testing.assert_array_equal(value, np.zeros(out_shape(row, lead)))
    assert gradient.shape == logits.shape
    np.testing.assert_array_equal(LOSSES[row].function(logits, targets, make_kernel(row)), value)


# text and ids out of range


@every_numeric_row
def test_targets_that_are_no_numbers_cost_nothing_whatever_the_last_row_of_k_holds(row):
    logits, _ = make_batch(VOCAB, LEAD)
    targets = np.resize([*text_ids(VOCAB), -1, -100, width(VOCAB), 2**31 - 1], LEAD).astype(np.int32)
    kernel = make_kernel(row)
    # "not a number" as index -1 would read the last row and the last value
    shaken = {field: np.asarray(getattr(kernel, field)).copy() for field in ("gram", "form")}
    for matrix in shaken.values():
        matrix[-1] = matrix[-1][::-1] + 5.0
    value, gradient = evaluate(row, logits, targets, kernel=dataclasses.replace(kernel, **shaken))
    np.testing.assert_array_equal(value, np.zeros(out_shape(row, LEAD)))
    np.testing.assert_array_equal(gradient, np.zeros_like(logits))


@every_numeric_row
def test_text_positions_get_exactly_zero_beside_numeric_ones(row):
    logits, targets = make_batch(VOCAB, LEAD, seed=4)
    is_text = ~np.asarray(numeric_mask(targets, VOCAB))
    assert is_text.any() and not is_text.all()
    value, gradient = evaluate(row, logits, targets)
    np.testing.assert_array_equal(np.asarray(gradient)[is_text], 0)
    if LOSSES[row].needs == "position":
        np.testing.assert_array_equal(np.asarray(value)[is_text], 0)
        assert (np.asarray(value)[~is_text] > 0).all()


@pytest.mark.parametrize("row", [row for row in NUMERIC_ROWS if not REFERENCES[row].sees_text])
def test_text_logits_are_not_seen_and_get_exactly_zero_gradient(row):
    logits, targets = make_batch(VOCAB, LEAD, seed=4)
    text = text_ids(VOCAB)
    value, gradient = evaluate(row, logits, targets)
    np.testing.assert_array_equal(np.asarray(gradient)[..., text], 0)
    assert np.abs(gradient).max() > 0
    for other in (5.0, -np.inf, np.nan):
        moved = logits.copy()
        moved[..., text] = other
        np.testing.assert_array_equal(evaluate(row, moved, targets)[0], value)


@pytest.mark.parametrize("bad", [-1, -100, -(2**31), width(VOCAB), 2**31 - 1])
@jit_or_eager
def test_an_unmasked_id_out_of_range_is_nan_in_cross_entropy_and_nothing_in_numeric_losses(bad, compiled):
    logits, targets = make_batch(VOCAB, LEAD, seed=4)
    targets[0, 2] = bad
    for row in LOSSES:
        value = np.asarray(evaluate(row, logits, targets, compiled=compiled)[0])
        if REFERENCES[row].numeric:
            chex.assert_tree_all_finite(value)
            if LOSSES[row].needs == "position":
                assert value[0, 2] == 0
        else:
            np.testing.assert_array_equal(np.isnan(value), np.arange(10).reshape(LEAD) == 2)


@every_row
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_non_finite_logit_at_a_live_position_is_not_cleaned_away(row, poison):
    logits, targets = make_batch(VOCAB, LEAD, seed=4)
    targets[1, 3] = VOCAB.token_ids[6]
    logits[1, 3, int(VOCAB.token_ids[2])] = poison
    value = np.asarray(evaluate(row, logits, targets)[0])
    assert not np.isfinite(value[1, 3] if value.ndim == 2 else value[1])
    assert np.isfinite(value[0]).all()


# reductions


def test_sum_and_count_ignore_what_the_mask_hides():
    values = jnp.array([[1.0, jnp.nan, 2.0], [jnp.inf, 4.0, -jnp.inf]])
    mask = jnp.array([[True, False, True], [False, True, False]])
    total, count = sum_and_count(values, mask)
    assert (total, count) == (7.0, 3)
    assert (total.dtype, count.dtype) == (jnp.float32, jnp.int32)
    assert mean_from(total, count) == np.float32(7 / 3)
    gradient = jax.grad(lambda values: mean_from(*sum_and_count(values, mask)))(values)
    np.testing.assert_array_equal(gradient, np.where(mask, np.float32(1 / 3), 0))


@pytest.mark.parametrize("total", [0.0, 3.0, np.nan, np.inf])
def test_mean_over_count_zero_is_zero_with_zero_gradient(total):
    with jax.debug_nans(np.isfinite(total)):
        value, gradient = jax.value_and_grad(lambda total: mean_from(total, jnp.int32(0)))(jnp.float32(total))
    assert value == 0 and gradient == 0


def test_sums_and_counts_of_micro_batches_add():
    kernel = make_kernel()
    logits, targets = make_batch(VOCAB, (6, 4), seed=3)
    values, mask = smmd_loss(logits, targets, kernel), numeric_mask(targets, kernel)
    parts = [sum_and_count(values[i : i + 2], mask[i : i + 2]) for i in (0, 2, 4)]
    together = mean_from(sum(part[0] for part in parts), sum(part[1] for part in parts))
    np.testing.assert_allclose(together, np.asarray(values)[np.asarray(mask)].mean(), rtol=1e-6)


def test_reductions_sum_in_float32_and_refuse_what_does_not_fit():
    total, count = sum_and_count(jnp.ones(4096, jnp.bfloat16), jnp.ones(4096, bool))
    assert (total, count, total.dtype) == (4096, 4096, jnp.float32)
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        sum_and_count(jnp.ones(3), jnp.ones(2, bool))
    with pytest.raises(TypeError, match="bool"):
        sum_and_count(jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeError, match=r"values.*complex"):
        sum_and_count(jnp.ones(3, complex), jnp.ones(3, bool))
    with pytest.raises(TypeError, match=r"values.*None"):
        sum_and_count(None, jnp.ones(3, bool))
    with pytest.raises(TypeError, match=r"sum.*complex"):
        mean_from(1j, 3)


def test_counts_beyond_32_bits_do_not_wrap():
    for count in (2**33, np.int64(2**33)):
        np.testing.assert_allclose(mean_from(2.0**34, count), 2.0)


# numeric_mask


@pytest.mark.parametrize("kernel", [VOCAB, make_kernel()], ids=["vocabulary", "kernel"])
def test_numeric_mask_marks_unmasked_numbers(kernel):
    number, text = int(VOCAB.token_ids[4]), int(text_ids(VOCAB)[0])
    targets = jnp.array([number, text, -100, -1, number, 2**31 - 1])
    np.testing.assert_array_equal(numeric_mask(targets, kernel), [True, False, False, False, True, False])
    mask = jnp.array([False, True, True, True, True, True])
    np.testing.assert_array_equal(numeric_mask(targets, kernel, mask=mask), [False, False, False, False, True, False])
    assert numeric_mask(targets, kernel).dtype == jnp.bool_
    np.testing.assert_array_equal(jax.jit(numeric_mask)(targets, kernel), numeric_mask(targets, kernel))


def test_numeric_mask_refuses_what_does_not_fit():
    with pytest.raises(TypeError, match="float32"):
        numeric_mask(jnp.ones(3), VOCAB)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)|\(3,\).*\(2,\)"):
        numeric_mask(jnp.ones(3, int), VOCAB, mask=jnp.ones(2, bool))
    with pytest.raises(TypeError, match="bool"):
        numeric_mask(jnp.ones(3, int), VOCAB, mask=jnp.ones(3, int))


# shift_targets: p0 p1 p2 is the prompt, a0 a1 eos the answer

IDS = np.array([11, 12, 13, 4, 7, 2])
ANSWER = np.array([0, 0, 0, 1, 1, 1], bool)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_shift_moves_targets_and_mask_by_one(make):
    targets, mask = shift_targets(make(IDS), make(ANSWER))
    np.testing.assert_array_equal(targets, [12, 13, 4, 7, 2])
    np.testing.assert_array_equal(mask, [False, False, True, True, True])
    assert isinstance(targets, type(make(IDS))) and mask.dtype == bool


def test_shift_works_on_the_last_axis_of_a_batch():
    targets, mask = shift_targets(np.tile(IDS, (2, 3, 1)), np.tile(ANSWER, (2, 3, 1)))
    np.testing.assert_array_equal(targets, np.tile(IDS[1:], (2, 3, 1)))
    np.testing.assert_array_equal(mask, np.tile(ANSWER[1:], (2, 3, 1)))


def test_shifted_targets_fit_the_logits_and_targets_moved_once_more_do_not():
    kernel = make_kernel()
    ids = np.array([*text_ids(VOCAB)[:3], *np.asarray(VOCAB.token_ids)[[3, 8]], text_ids(VOCAB)[4]])
    targets, mask = shift_targets(ids, ANSWER)
    logits = 50.0 * jax.nn.one_hot(targets, width(VOCAB))
    assert float(cross_entropy_loss(logits, targets, mask=mask).max()) < 1e-6
    assert float(smmd_loss(logits, targets, kernel, mask=mask).max()) < 1e-6
    twice, mask_twice = np.roll(targets, -1), np.roll(mask, -1) & mask
    assert float(mean_from(*sum_and_count(cross_entropy_loss(logits, twice), mask_twice))) > 1


def test_unshifted_targets_of_another_length_raise_with_both_shapes_and_the_way_out():
    for function in (
        lambda: cross_entropy_loss(jnp.zeros((5, 16)), IDS),
        lambda: smmd_loss(jnp.zeros((5, 16)), IDS, make_kernel()),
    ):
        with pytest.raises(ValueError, match="shift_targets") as caught:
            function()
        assert "(5, 16)" in str(caught.value) and "(6,)" in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        (np.zeros((2, 6), int), np.zeros((2, 5), bool), ValueError, r"\(2, 6\).*\(2, 5\)"),
        (np.zeros(6, int), np.zeros((1, 6), bool), ValueError, r"\(6,\).*\(1, 6\)"),
        (np.int32(3), np.bool_(True), ValueError, r"\(\)"),
        (np.zeros((2, 0), int), np.zeros((2, 0), bool), ValueError, r"\(2, 0\)"),
        (np.zeros(6), np.zeros(6, bool), TypeError, "float64"),
        (np.zeros(6, int), np.zeros(6, int), TypeError, "int64"),
    ],
    ids=["length", "rank", "scalar", "empty", "float ids", "integer mask"],
)
def test_shift_refuses_what_does_not_fit(ids, mask, error, message):
    with pytest.raises(error, match=message):
        shift_targets(ids, mask)


# check_targets


def test_check_targets_passes_good_batches_and_masked_rubbish():
    check_targets(np.array([[0, 31], [5, 6]]), 32)
    check_targets(np.array([[-100, 2**40], [5, 6]]), 32, mask=np.array([[False, False], [True, True]]))
    check_targets(jnp.array([[0, 31]]), 32)
    check_targets(np.zeros((0, 4), int), 32)
    check_targets([], 3)
    check_targets([[1, 2]], 3)
    for kind in (np.int64, np.uint16, np.array, jnp.int32):
        check_targets(np.array([[0, 31]]), kind(32))


def test_an_empty_list_is_no_targets_rather_than_floats():
    kernel, logits = make_kernel(), np.zeros((0, width(VOCAB)), np.float32)
    assert smmd_loss(logits, [], kernel).shape == numeric_mask([], kernel).shape == (0,)


@pytest.mark.parametrize("bad", [-1, -100, 32, 2**31 + 5, 2**40, -(2**40)])
def test_check_targets_names_row_column_value_and_vocabulary(bad):
    targets = np.full((4, 7), 3, np.int64)
    targets[2, 5] = bad
    with pytest.raises(TokenRangeError) as caught:
        check_targets(targets, 32, mask=np.ones((4, 7), bool))
    message = str(caught.value)
    assert "row 2" in message and "column 5" in message and str(bad) in message and "32" in message
    with pytest.raises(ValueError, match="row 2, column 5"):  # also without a mask, and as a ValueError
        check_targets(targets, 32)


def test_check_targets_names_the_first_of_several_and_handles_other_ranks():
    with pytest.raises(TokenRangeError, match=r"row 0, column 1 is 40.*2 such targets"):
        check_targets(np.array([[1, 40], [-3, 1]]), 32)
    with pytest.raises(TokenRangeError, match="column 1"):
        check_targets(np.array([1, 40]), 32)
    with pytest.raises(TokenRangeError, match="40"):
        check_targets(np.int32(40), 32)
    with pytest.raises(TokenRangeError, match=r"\(1, 0\), column 2"):
        check_targets(np.where(np.arange(12).reshape(2, 2, 3) == 8, 40, 1), 32)


@pytest.mark.parametrize(
    ("targets", "vocab_size", "mask", "error", "message"),
    [
        (np.zeros((2, 3)), 32, None, TypeError, "float64"),
        (np.zeros((2, 3), bool), 32, None, TypeError, "bool"),
        (np.zeros(0), 32, None, TypeError, "float64"),
        (None, 32, None, TypeError, "targets.*None"),
        ([[1], [1, 2]], 32, None, TypeError, "targets.*length"),
        (["1"], 32, None, TypeError, "targets.*list"),
        (np.zeros((2, 3), int), 32, np.zeros((3, 2), bool), ValueError, r"\(3, 2\)"),
        (np.zeros((2, 3), int), 32, np.zeros((2, 3), int), TypeError, "int64"),
        (np.zeros((2, 3), int), 0, None, ValueError, "vocab_size"),
        (np.zeros((2, 3), int), 32.0, None, (ValueError, TypeError), "vocab_size"),
    ],
    ids=["float targets", "boolean targets", "no floats", "none", "ragged", "words",
         "mask of another shape", "integer mask", "no vocabulary", "float size"],
)
def test_check_targets_refuses_what_it_cannot_check(targets, vocab_size, mask, error, message):
    with pytest.raises(error, match=message):
        check_targets(targets, vocab_size, mask=mask)


def test_check_targets_says_that_it_runs_on_the_host():
    with pytest.raises(TypeError, match="host"):
        jax.jit(lambda targets: check_targets(targets, 32))(jnp.zeros(3, int))
