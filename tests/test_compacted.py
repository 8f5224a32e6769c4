"""Losses at numeric rows alone: what all rows give, whatever their number, and products that follow it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax import LOSSES, cross_entropy_loss, smmd_loss
from smmd_jax.losses.compacted import is_worth_compacting, losses_at_numbers
from smmd_jax.operands import live_rows, match_targets
from tests.cases import make_kernel, make_vocab, text_ids, width
from tests.programs import products
from train.chunked_head import chunked_losses
from train.partition import make_mesh

SIZE, LENGTH, WIDTH = 300, 128, 16
ROUND = 24  # 3/16 of the row
BY_POSITION = [name for name, spec in LOSSES.items() if spec.columns is not None and spec.needs == "position"]


def problem(counts, dtype=jnp.float32, seed=0):
    """Hidden states, columns, targets with so many numbers in each row, mask, weights."""
    vocab, rng = make_vocab(SIZE), np.random.default_rng(seed)
    kernel = make_kernel(size=SIZE)
    shape = (len(counts), LENGTH)
    targets = rng.choice(text_ids(vocab), shape).astype(np.int32)
    for row, count in enumerate(counts):
        targets[row, rng.permutation(LENGTH)[:count]] = rng.choice(np.asarray(kernel.token_ids), count)
    hidden = jnp.asarray(rng.standard_normal((*shape, WIDTH)), dtype)
    head = jnp.asarray(rng.standard_normal((WIDTH, width(vocab))), dtype)
    return hidden, head[:, kernel.token_ids], targets, kernel, rng.random(shape) < 0.9, rng.random(shape)


def dense(loss_of_columns, hidden, columns, targets, kernel, mask):
    match = match_targets(jnp.asarray(targets), kernel.token_ids, mask)
    scores = jnp.einsum("btd,dn->btn", hidden, columns, preferred_element_type=jnp.float32)
    return loss_of_columns(live_rows(scores, match.any(-1)), match, kernel)


@functools.partial(jax.jit, static_argnums=(0, 1))
def both(function, loss_of_columns, hidden, columns, weights, targets, kernel, mask):
    values, pull = jax.vjp(lambda *arrays: function(loss_of_columns, *arrays, targets, kernel, mask), hidden, columns)
    return values, *pull(jnp.asarray(weights, jnp.float32))


COUNTS = [(0, 0), (1, 0), (ROUND, 3), (ROUND + 1, 0), (LENGTH, 40), (LENGTH, LENGTH)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_any_number_of_numbers_gives_what_all_rows_give(counts):
    hidden, columns, targets, kernel, mask, weights = problem(counts)
    rest = (hidden, columns, weights, targets, kernel, mask)
    for name in BY_POSITION if counts == (ROUND + 1, 0) else ["smmd"]:
        wanted = both(dense, LOSSES[name].columns, *rest)
        found = both(losses_at_numbers, LOSSES[name].columns, *rest)
        for one, other in zip(found, wanted, strict=True):
            # Products of other shapes, whose sums XLA takes in another order; Huber's are differences of large ones.
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * np.abs(other).max(initial=0), err_msg=name)


def test_sixteen_bit_states_give_gradients_of_their_dtype():
    hidden, columns, targets, kernel, mask, weights = problem((ROUND, 5), jnp.bfloat16)
    rest = (hidden, columns, weights, targets, kernel, mask)
    values, by_hidden, by_columns = both(losses_at_numbers, LOSSES["smmd"].columns, *rest)
    assert (values.dtype, by_hidden.dtype, by_columns.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    wide = (hidden.astype(jnp.float32), columns.astype(jnp.float32), weights, targets, kernel, mask)
    wanted, wanted_by_hidden, _ = both(dense, LOSSES["smmd"].columns, *wide)
    np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-6)
    # delta and result are rounded to 8 bits once each
    np.testing.assert_allclose(
        by_hidden.astype(jnp.float32), wanted_by_hidden, rtol=0, atol=0.02 * np.abs(wanted_by_hidden).max()
    )


def test_masked_rows_may_hold_anything():
    hidden, columns, targets, kernel, mask, weights = problem((60, 10))
    poisoned = jnp.where(mask[..., None], hidden, jnp.nan)
    clean = both(losses_at_numbers, LOSSES["smmd"].columns, hidden, columns, weights, targets, kernel, mask)
    targets = np.where(mask, targets, -100)
    dirty = both(losses_at_numbers, LOSSES["smmd"].columns, poisoned, columns, weights, targets, kernel, mask)
    for one, other in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_last_row_may_hold_anything_where_a_round_has_rows_to_spare():
    """A round is filled up with the last row of a sequence, whose state must not reach the gradient of the columns."""
    hidden, columns, targets, kernel, mask, weights = problem((3, 0))
    mask = np.array(mask)
    mask[..., -1] = False
    clean = both(losses_at_numbers, LOSSES["smmd"].columns, hidden, columns, weights, targets, kernel, mask)
    hidden = hidden.at[..., -1, :].set(jnp.nan)
    dirty = both(losses_at_numbers, LOSSES["smmd"].columns, hidden, columns, weights, targets, kernel, mask)
    for one, other in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(one, other)


def test_products_have_the_rows_of_a_round_and_not_all():
    hidden, columns, targets, kernel, mask, _ = problem((5, 5))
    total = lambda hidden: losses_at_numbers(LOSSES["smmd"].columns, hidden, columns, targets, kernel, mask).sum()
    jaxpr = jax.make_jaxpr(jax.grad(total))(hidden).jaxpr
    assert products(jaxpr, (2, LENGTH, WIDTH)) == 0 and products(jaxpr, (2, ROUND, WIDTH)) > 0


def test_few_tokens_or_rows_are_not_worth_it():
    assert is_worth_compacting((8, 128), make_kernel(size=SIZE))
    assert not is_worth_compacting((8, 128), make_kernel()) and not is_worth_compacting((8, 32), make_kernel(size=SIZE))


def whole_loss(hidden, head, targets, kernel, mask, ce_weights, numeric_weights):
    logits = hidden @ head
    ce, smmd = cross_entropy_loss(logits, targets, mask=mask), smmd_loss(logits, targets, kernel, mask=mask)
    return jnp.sum(ce_weights * ce) + jnp.sum(numeric_weights * smmd)


@pytest.mark.parametrize("sizes", [None, {"data": 2}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_chunks_on_a_mesh_take_the_numeric_rows_of_each_device(sizes):
    """The gradient of the columns is reduced over devices once, with the head's."""
    _, _, targets, kernel, mask, weights = problem((40, 0, 25, 3))
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((*targets.shape, WIDTH)).astype(np.float32)
    head = rng.standard_normal((WIDTH, width(make_vocab(SIZE)))).astype(np.float32)
    mask, ce_weights, numeric_weights = jnp.asarray(mask), jnp.asarray(mask * 0.01), jnp.asarray(mask * weights)
    mesh = make_mesh(sizes) if sizes else None

    def chunked(hidden, head):
        return chunked_losses(
            hidden, head, targets, kernel, spec=LOSSES["smmd"], ce_weights=ce_weights.astype(jnp.float32),
            numeric_weights=numeric_weights.astype(jnp.float32), mask=mask, mesh=mesh,
        )[0]  # fmt: skip

    dense = lambda hidden, head: whole_loss(hidden, head, targets, kernel, mask, ce_weights, numeric_weights)
    (found, gradients), (wanted, wanted_gradients) = (
        jax.jit(jax.value_and_grad(function, (0, 1)))(hidden, head) for function in (chunked, dense)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
