"""The chunked forms against full logits: every position loss, any chunk, bfloat16, masks, shards, and bad operands."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from smmd_jax import (
    LOSSES,
    TokenRangeError,
    chunked_cross_entropy_and_numeric,
    chunked_loss_sums,
    cross_entropy_loss,
    make_numeric_kernel,
    make_numeric_vocab,
    numeric_mask,
)
from tests.cases import POSITION_ROWS, SEQUENCE_ROWS, make_batch, make_kernel, make_vocab, width
from tests.programs import equations
from tests.reference import REFERENCES

VOCAB = make_vocab(10)
V, D, ROWS = width(VOCAB), 8, 15
CHUNKS = (1, ROWS, ROWS + 9, None)
# float32 sums over the vocabulary and over chunks come in another order
TOLERANCE = 2e-5

# One row for each way through the code: numeric columns, numeric over the whole vocabulary, not numeric.
PATHS = {(LOSSES[row].columns is None, REFERENCES[row].numeric): row for row in reversed(POSITION_ROWS)}
every_position_row = pytest.mark.parametrize("row", POSITION_ROWS)
every_path = pytest.mark.parametrize("row", PATHS.values())


def make_problem(lead=(3, 5), dtype=jnp.float32, seed=0):
    """hidden [*lead, D], head [D, V], targets [*lead] and two different weights [*lead]."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((*lead, D)), dtype)
    head = jnp.asarray(rng.standard_normal((D, V)), dtype)
    targets = make_batch(VOCAB, lead, seed)[1]
    weights = rng.uniform(0.1, 2.0, (2, *lead)).astype(np.float32)
    return hidden, head, targets, *weights


def dense_sums(hidden, head, targets, kernel, ce_weights, numeric_weights, *, row):
    """Both weighted sums from the logits of all positions."""
    logits = jnp.einsum("...d,dv->...v", hidden, head, preferred_element_type=jnp.float32)
    ce = cross_entropy_loss(logits, targets, mask=ce_weights != 0)
    numeric = LOSSES[row].function(logits, targets, kernel, mask=numeric_weights != 0)
    return jnp.sum(ce_weights * ce), jnp.sum(numeric_weights * numeric)


def chunked_sums(hidden, head, targets, kernel, ce_weights, numeric_weights, *, row, chunk=None):
    return chunked_loss_sums(
        hidden, head, targets, kernel, loss=row, chunk=chunk, ce_weights=ce_weights, numeric_weights=numeric_weights
    )


def remade_sums(hidden, head, targets, kernel, ce_weights, numeric_weights, *, row, chunk=None):
    """The same sums from the values of each position."""
    mask = (ce_weights != 0) | (numeric_weights != 0)
    ce, numeric = chunked_cross_entropy_and_numeric(
        hidden, head, targets, kernel, loss=row, mask=mask, chunk=chunk
    )
    return jnp.sum(ce_weights * ce), jnp.sum(numeric_weights * numeric)


FORMS = {"sums with gradients in the forward scan": chunked_sums, "values made again in the backward": remade_sums}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@functools.partial(jax.jit, static_argnames=("function", "row", "chunk"))
def values_and_gradients(function, *operands, cotangents=(1.0, 1.0), **options):
    """Both sums, and the gradient of their combination by hidden and head."""
    sums, pull = jax.vjp(lambda hidden, head: function(hidden, head, *operands[2:], **options), *operands[:2])
    return sums, pull(tuple(jnp.float32(cotangent) for cotangent in cotangents))


def operands_of(row, problem):
    hidden, head, targets, ce_weights, numeric_weights = problem
    return hidden, head, targets, make_kernel(row), ce_weights, numeric_weights


def assert_relative(actual, wanted, tolerance=TOLERANCE):
    """Errors relative to the largest entry of each array."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        chex.assert_equal_shape([one, other])
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.abs(one - other).max(initial=0) <= tolerance * np.abs(other).max(initial=0) + 1e-9


# equality with full logits


@every_form
@pytest.mark.parametrize(
    ("row", "chunk"), [(row, 7) for row in POSITION_ROWS] + [(row, chunk) for row in PATHS.values() for chunk in CHUNKS]
)
def test_values_and_gradients_are_those_of_full_logits(form, row, chunk):
    operands = operands_of(row, make_problem())
    wanted = values_and_gradients(dense_sums, *operands, row=row)
    assert_relative(values_and_gradients(form, *operands, row=row, chunk=chunk), wanted)


@every_position_row
def test_each_position_has_the_value_of_full_logits(row):
    hidden, head, targets, *_ = make_problem()
    mask = np.random.default_rng(1).random(targets.shape) < 0.7
    kernel = make_kernel(row)
    ce, numeric = chunked_cross_entropy_and_numeric(hidden, head, targets, kernel, loss=row, mask=mask, chunk=4)
    logits = hidden @ head
    chex.assert_type([ce, numeric], jnp.float32)
    np.testing.assert_allclose(ce, cross_entropy_loss(logits, targets, mask=mask), rtol=TOLERANCE, atol=1e-6)
    wanted = LOSSES[row].function(logits, targets, kernel, mask=mask)
    np.testing.assert_allclose(numeric, wanted, rtol=TOLERANCE, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(ce)[~mask], 0)
    np.testing.assert_array_equal(np.asarray(numeric)[~mask], 0)


@every_form
@pytest.mark.parametrize("lead", [(15,), (3, 5), (1, 3, 1, 5)], ids=str)
def test_leading_axes_are_free(form, lead):
    operands = operands_of("smmd", make_problem((3, 5)))
    wanted = values_and_gradients(form, *operands, row="smmd", chunk=4)
    hidden, head, targets, kernel, *weights = operands
    moved = (hidden.reshape(*lead, D), head, targets.reshape(lead), kernel, *(part.reshape(lead) for part in weights))
    sums, (by_hidden, by_head) = values_and_gradients(form, *moved, row="smmd", chunk=4)
    chex.assert_shape(by_hidden, (*lead, D))
    chex.assert_trees_all_close((sums, (by_hidden.reshape(3, 5, D), by_head)), wanted, rtol=1e-6, atol=1e-7)


@every_form
def test_one_position_without_leading_axes(form):
    hidden, head, targets, kernel, ce_weights, numeric_weights = operands_of("smmd", make_problem())
    one = hidden[0, 1], head, targets[0, 1], kernel, ce_weights[0, 1], numeric_weights[0, 1]
    wanted = values_and_gradients(dense_sums, *one, row="smmd")
    assert_relative(values_and_gradients(form, *one, row="smmd"), wanted)


@every_form
@every_path
def test_jit_equals_eager(form, row):
    operands = operands_of(row, make_problem())
    eager = values_and_gradients.__wrapped__(form, *operands, row=row, chunk=4)
    assert_relative(values_and_gradients(form, *operands, row=row, chunk=4), eager)


@every_form
def test_sums_without_a_gradient_are_the_same_sums(form):
    operands = operands_of("smmd", make_problem())
    plain = form(*operands, row="smmd", chunk=4)
    assert_relative(plain, values_and_gradients(form, *operands, row="smmd", chunk=4)[0])


@every_form
@every_path
@pytest.mark.parametrize("cotangents", [(0.7, -2.3), (0.0, 1.0)], ids=str)
def test_each_sum_has_a_gradient_of_its_own(form, row, cotangents):
    operands = operands_of(row, make_problem())
    wanted = values_and_gradients(dense_sums, *operands, row=row, cotangents=cotangents)
    assert_relative(values_and_gradients(form, *operands, row=row, chunk=4, cotangents=cotangents), wanted)


@every_form
def test_a_product_of_the_sums_is_differentiated(form):
    """As `scale_to_ce` joins them: the cotangents are not constants."""

    def joined(function, hidden, head, *rest, **options):
        ce, numeric = function(hidden, head, *rest, row="smmd", **options)
        return jnp.sin(ce) * numeric / (1.0 + numeric)

    hidden, head, *rest = operands_of("smmd", make_problem())
    gradient = jax.grad(lambda hidden, head: joined(form, hidden, head, *rest, chunk=4), (0, 1))(hidden, head)
    wanted = jax.grad(lambda hidden, head: joined(dense_sums, hidden, head, *rest), (0, 1))(hidden, head)
    assert_relative(gradient, wanted)


def test_weights_and_kernel_are_constants_of_the_sums():
    hidden, head, targets, kernel, ce_weights, numeric_weights = operands_of("smmd", make_problem())

    def total(kernel, ce_weights, numeric_weights):
        return sum(chunked_sums(hidden, head, targets, kernel, ce_weights, numeric_weights, row="smmd", chunk=4))

    gradient = jax.grad(total, (0, 1, 2), allow_int=True)(kernel, ce_weights, numeric_weights)
    for leaf in jax.tree.leaves(gradient):
        assert leaf.dtype == jax.dtypes.float0 or not np.asarray(leaf).any()


def test_values_by_position_have_a_second_derivative():
    hidden, head, *rest = operands_of("smmd", make_problem())

    def curvature(function, **options):
        total = lambda hidden: sum(function(hidden, head, *rest, row="smmd", **options))
        return jax.jvp(jax.grad(total), (hidden,), (jnp.cos(hidden),))[1]

    assert_relative(curvature(remade_sums, chunk=4), curvature(dense_sums))


# precision


def test_bfloat16_operands_accumulate_in_float32():
    """Value: the same float32 logits. Gradient: delta is rounded to bfloat16 (2^-9 relative) before its products.

    Each entry sums over the vocabulary or the rows, so errors of both signs stay below two roundings of the largest.
    """
    problem = make_problem((6, 50), jnp.bfloat16)
    operands = operands_of("smmd", problem)
    upcast = tuple(part.astype(jnp.float32) for part in problem[:2])
    sums, (by_hidden, by_head) = values_and_gradients(dense_sums, *upcast, *operands[2:], row="smmd")
    for form in FORMS.values():
        found, gradients = values_and_gradients(form, *operands, row="smmd", chunk=64)
        chex.assert_type([*found, *gradients], [jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16])
        assert_relative(found, sums)
        assert_relative(gradients, (by_hidden, by_head), tolerance=2**-7)


def test_the_head_gradient_does_not_lose_small_chunks():
    """4096 equal rows one by one: a bfloat16 sum would stop growing at 256 of them."""
    rows = 4096
    hidden, head = jnp.ones((rows, D), jnp.bfloat16), jnp.zeros((D, V), jnp.bfloat16)
    operands = hidden, head, np.full(rows, int(VOCAB.token_ids[3])), make_kernel(), np.ones(rows), np.zeros(rows)
    _, (_, by_head) = values_and_gradients(chunked_sums, *operands, row="smmd", chunk=16)
    wanted = rows * (1 / V - (np.arange(V) == int(VOCAB.token_ids[3])))
    np.testing.assert_allclose(by_head[0].astype(jnp.float32), wanted, rtol=2**-7)


def test_no_product_has_a_float32_operand_when_the_model_is_bfloat16():
    operands = operands_of("smmd", make_problem(dtype=jnp.bfloat16))

    traced = jax.make_jaxpr(functools.partial(values_and_gradients, chunked_sums, row="smmd", chunk=4))(*operands)
    dots = [equation for equation in equations(traced.jaxpr) if equation.primitive.name == "dot_general"]
    pairs = [tuple(operand.aval for operand in equation.invars) for equation in dots]
    with_head = [pair for pair in pairs if any(V in operand.shape for operand in pair)]
    assert len(with_head) >= 3
    assert all(operand.dtype == jnp.bfloat16 for pair in with_head for operand in pair), with_head


# what does not count


@every_form
@every_position_row
def test_positions_of_weight_zero_may_hold_anything(form, row):
    hidden, head, targets, kernel, ce_weights, numeric_weights = operands_of(row, make_problem())
    dead = np.random.default_rng(2).random(targets.shape) < 0.4
    weights = np.where(dead, 0, ce_weights), np.where(dead, 0, numeric_weights)
    clean = values_and_gradients(form, hidden, head, targets, kernel, *weights, row=row, chunk=4)
    poisoned = jnp.where(dead[..., None], jnp.nan, hidden), np.where(dead, np.int32(-100), targets)
    dirty = values_and_gradients(form, poisoned[0], head, poisoned[1], kernel, *weights, row=row, chunk=4)
    chex.assert_tree_all_finite(clean)
    chex.assert_trees_all_equal(dirty, clean)
    np.testing.assert_array_equal(np.asarray(dirty[1][0])[dead], 0)


@every_form
def test_the_two_weights_choose_their_positions_apart(form):
    """Cross entropy on some positions, the numeric loss on others: each sum sees its own weights alone."""
    hidden, head, targets, kernel, ce_weights, numeric_weights = operands_of("smmd", make_problem())
    at = np.arange(targets.size).reshape(targets.shape) % 2 == 0
    operands = hidden, head, targets, kernel, np.where(at, ce_weights, 0), np.where(at, 0, numeric_weights)
    wanted = values_and_gradients(dense_sums, *operands, row="smmd")
    assert_relative(values_and_gradients(form, *operands, row="smmd", chunk=4), wanted)


@every_form
@every_path
def test_all_weights_zero_is_zero_with_zero_gradient(form, row):
    hidden, head, targets, kernel, *_ = operands_of(row, make_problem())
    none = np.zeros(targets.shape, np.float32)
    found = values_and_gradients(form, hidden * jnp.nan, head, targets, kernel, none, none, row=row, chunk=4)
    chex.assert_trees_all_equal(found, jax.tree.map(jnp.zeros_like, found))


@every_form
@every_path
@pytest.mark.parametrize("lead", [(0,), (3, 0)], ids=str)
def test_an_empty_batch_is_zero_with_zero_gradient(form, row, lead):
    operands = operands_of(row, make_problem(lead))
    sums, (by_hidden, by_head) = values_and_gradients(form, *operands, row=row)
    assert sums == (0, 0)
    chex.assert_shape(by_hidden, (*lead, D))
    np.testing.assert_array_equal(by_head, np.zeros((D, V)))


@every_form
def test_an_id_out_of_range_is_nan_and_not_a_neighbour(form):
    hidden, head, targets, kernel, *weights = operands_of("smmd", make_problem())
    targets = targets.copy()
    targets[1, 2] = V
    ce, numeric = form(hidden, head, targets, kernel, *weights, row="smmd", chunk=4)
    assert np.isnan(ce) and np.isfinite(numeric)


def test_padding_of_the_last_chunk_costs_nothing():
    """Sixteen rows in chunks of fifteen: the fourteen rows of padding have target 0, which is a number here."""
    kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
    hidden, head, targets, *weights = make_problem((16,))
    operands = hidden, head, targets, kernel, *weights
    wanted = values_and_gradients(dense_sums, *operands, row="smmd")
    for form in FORMS.values():
        assert_relative(values_and_gradients(form, *operands, row="smmd", chunk=15), wanted)


# transformations


def test_each_row_of_a_vmapped_batch_is_on_its_own():
    hidden, head, targets, kernel, *weights = operands_of("smmd", make_problem())

    def of_one(hidden, targets, ce_weights, numeric_weights):
        operands = hidden, head, targets, kernel, ce_weights, numeric_weights
        return values_and_gradients(chunked_sums, *operands, row="smmd", chunk=2)

    found = jax.vmap(of_one)(hidden, targets, *weights)
    for i in range(len(targets)):
        wanted = of_one(hidden[i], targets[i], *(part[i] for part in weights))
        chex.assert_trees_all_close(jax.tree.map(lambda part, i=i: part[i], found), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@every_form
@every_path
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_the_rows_add_up_and_the_head_gradient_is_summed_over_them(form, row, check_vma):
    operands = operands_of(row, make_problem((8, 3)))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = P("data")

    def of_shard(*operands):
        return jax.tree.map(lambda part: jax.lax.psum(part, "data"), form(*operands, row=row, chunk=2))

    sharded = jax.shard_map(
        of_shard, mesh=mesh, in_specs=(rows, P(), rows, P(), rows, rows), out_specs=P(), check_vma=check_vma
    )
    wanted = values_and_gradients(form, *operands, row=row, chunk=2)
    found = values_and_gradients(lambda *operands, row: sharded(*operands), *operands, row=row)
    assert_relative(found, wanted)


def test_gradients_inside_a_shard_are_local_until_they_are_summed():
    """As a training step does it: the gradient of the shard's own sum, one psum of the head's gradient at the end."""
    operands = operands_of("smmd", make_problem((8, 3)))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = P("data")

    def of_shard(hidden, head, *rest):
        total = lambda hidden, head: sum(chunked_sums(hidden, head, *rest, row="smmd", chunk=2))
        local_head = jax.lax.pcast(head, "data", to="varying")
        by_hidden, by_head = jax.grad(total, (0, 1))(hidden, local_head)
        return by_hidden, jax.lax.psum(by_head, "data")

    specs = dict(in_specs=(rows, P(), rows, P(), rows, rows), out_specs=(rows, P()))
    found = jax.jit(jax.shard_map(of_shard, mesh=mesh, **specs))(*operands)
    assert_relative(found, values_and_gradients(chunked_sums, *operands, row="smmd", chunk=2)[1])


# refusals

GOOD = dict(zip(("hidden", "head", "targets", "ce_weights", "numeric_weights"), make_problem(), strict=True))
REFUSED = {
    # name: (what is passed instead, error, parts of the message)
    "chunk of zero": ({"chunk": 0}, ValueError, ["chunk", "0"]),
    "negative chunk": ({"chunk": -4}, ValueError, ["-4"]),
    "half a chunk": ({"chunk": 2.5}, ValueError, ["2.5"]),
    "chunk that is a flag": ({"chunk": True}, ValueError, ["True"]),
    "a loss of sequences": ({"loss": SEQUENCE_ROWS[0]}, ValueError, [SEQUENCE_ROWS[0], "sequence"]),
    "an unknown loss": ({"loss": "sdmm"}, ValueError, ["sdmm", *LOSSES]),
    "a turned head": ({"head": np.zeros((V, D), np.float32)}, ValueError, [f"({V}, {D})", "head.T"]),
    "a head of another depth": ({"head": np.zeros((D + 1, V), np.float32)}, ValueError, [f"({D + 1}, {V})"]),
    "a head too narrow": ({"head": np.zeros((D, 5), np.float32)}, TokenRangeError, ["5"]),
    "an integer head": ({"head": np.zeros((D, V), int)}, TypeError, ["int"]),
    "float targets": ({"targets": np.zeros((3, 5), np.float32)}, TypeError, ["float32"]),
    "targets of another shape": ({"targets": np.zeros((3, 4), int)}, ValueError, ["(3, 4)", f"(3, 5, {D})"]),
    "a kernel that is none": ({"kernel": {"5": 5}}, TypeError, ["NumericKernel"]),
}
REFUSED_BY_SUMS = {
    "weights of another shape": ({"ce_weights": np.ones((3, 4))}, ValueError, ["ce_weights", "(3, 4)", "(3, 5)"]),
    "complex weights": ({"ce_weights": np.ones((3, 5), complex)}, TypeError, ["ce_weights", "complex"]),
    "no weights": ({"numeric_weights": None}, TypeError, ["numeric_weights", "None"]),
    "weights that would broadcast": ({"numeric_weights": np.ones(())}, ValueError, ["numeric_weights", "()"]),
}


def call(function, changes):
    operands = {**GOOD, "kernel": make_kernel(), **changes}
    if function is chunked_cross_entropy_and_numeric:
        operands = {name: part for name, part in operands.items() if not name.endswith("weights")}
    return function(**operands)


@pytest.mark.parametrize("function", [chunked_loss_sums, chunked_cross_entropy_and_numeric])
@pytest.mark.parametrize("bad", REFUSED)
def test_operands_that_do_not_fit_are_refused_with_what_came(function, bad):
    changes, error, parts = REFUSED[bad]
    with pytest.raises(error) as caught:
        call(function, changes)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("bad", REFUSED_BY_SUMS)
def test_weights_that_do_not_fit_are_refused(bad):
    changes, error, parts = REFUSED_BY_SUMS[bad]
    with pytest.raises(error) as caught:
        call(chunked_loss_sums, changes)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("kind", [np.int64, np.array, jnp.int32], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("function", [chunked_loss_sums, chunked_cross_entropy_and_numeric])
def test_a_chunk_may_be_any_integer(function, kind):
    chex.assert_trees_all_equal(call(function, {"chunk": kind(4)}), call(function, {"chunk": 4}))


def test_a_mask_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="must be boolean"):
        call(chunked_cross_entropy_and_numeric, {"mask": np.ones((3, 5), int)})
    with pytest.raises(ValueError, match=r"\(5,\)"):
        call(chunked_cross_entropy_and_numeric, {"mask": np.ones(5, bool)})


@pytest.mark.parametrize("function", [chunked_loss_sums, chunked_cross_entropy_and_numeric])
@every_position_row
def test_a_bare_vocabulary_serves_where_no_kernel_is_used(function, row):
    if REFERENCES[row].uses_gram:
        with pytest.raises(TypeError, match="make_numeric_kernel"):
            call(function, {"kernel": VOCAB, "loss": row})
    else:
        found = call(function, {"kernel": VOCAB, "loss": row, "chunk": 4})
        chex.assert_trees_all_equal(found, call(function, {"loss": row, "chunk": 4}))


def test_the_problem_has_numbers_and_text():
    """Otherwise half of this file would compare zeros."""
    is_number = np.asarray(numeric_mask(make_problem()[2], VOCAB))
    assert is_number.any() and not is_number.all()
