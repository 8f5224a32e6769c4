"""The common suite: every row of LOSSES against its float64 reference, and the promises that all rows share."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.test_util import check_grads

from smmd_jax import (
    KERNELS,
    LOSSES,
    TokenRangeError,
    make_numeric_kernel,
    make_numeric_vocab,
    smmd_loss,
    smmd_loss_from_hidden,
    smmd_loss_from_numeric_logits,
    smmd_terms,
)
from tests import reference
from tests.cases import (
    NUMERIC_ROWS,
    certain_logits,
    evaluate,
    kernel_options,
    make_batch,
    make_kernel,
    make_numbers_of,
    make_vocab,
    out_shape,
    terms_of,
    text_ids,
    width,
)
from tests.reference import REFERENCES

every_row = pytest.mark.parametrize("row", LOSSES)
every_numeric_row = pytest.mark.parametrize("row", NUMERIC_ROWS)
SMMD_ROWS = [row for row in NUMERIC_ROWS if REFERENCES[row].uses_gram and not REFERENCES[row].sees_text]
SIZES = (1, 2, 3, 10, 100, 1000)
# float32 arithmetic on sums of up to a thousand terms, against float64 on the same float32 logits
TOLERANCE = 2e-5


def rows_by_size(rows, sizes):
    pairs = [(row, size) for row in rows for size in sizes if size == 10 or not REFERENCES[row].digits_only]
    return [pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] == 1000 else []) for pair in pairs]


def test_every_row_has_a_reference():
    assert set(LOSSES) == set(REFERENCES)


@every_row
def test_facts_of_the_row(row):
    spec = LOSSES[row]
    assert spec.needs in ("position", "sequence")
    assert spec.join in ("add", "scale_to_ce", "replace_ce")
    assert spec.default_weight > 0 and spec.source
    assert isinstance(spec.minimum_at_target, bool)


@functools.cache
def compiled(row):
    return jax.jit(LOSSES[row].function)


# value and gradient against the formulas


@functools.cache
def gram_of(size, name, *options):
    return KERNELS[name[1]](np.arange(float(size)), **dict(options))


@functools.cache
def kernels_of(row, size):
    """(options, float64 Gram matrix or None, NumericKernel): every kernel for a row that uses one, else the default."""
    vocab, terms = make_vocab(size), terms_of(row)
    if not REFERENCES[row].uses_gram:
        return [({}, None, make_kernel(row, size))]
    found = []
    for options in kernel_options(size)[:: 1 if size <= 100 else 5]:
        gram = gram_of(size, *options.items())
        found.append((options, gram, make_numeric_kernel(vocab, **options, terms=terms)))
    return found


def wanted_gradient(row, logits, targets, numbers, weights, where):
    """d sum(weights * loss) / d logits in float64; NaN at coordinates outside `where`."""
    entry = REFERENCES[row]
    axes = 1 if LOSSES[row].needs == "position" else 2
    weights = weights.reshape(*weights.shape, *([1] * axes))
    if entry.gradient is not None:
        return weights * entry.gradient(logits, targets, numbers)

    def value(logits):
        return entry.value(logits, np.broadcast_to(targets, logits.shape[:-1]), numbers)

    return weights * reference.central_difference(value, logits, axes, where=where)


def assert_gradient_close(actual, wanted, value, row, message):
    """Error relative to the largest entry of one position's or sequence's gradient.

    Where a wrong prediction is certain, the gradient is the small difference of numbers as large as the loss, and where
    a softmax over the whole vocabulary is certain, p - 1 is rounded at 1: the rounding of these is granted too.
    """
    axes = (-1,) if LOSSES[row].needs == "position" else (-2, -1)
    scale = np.max(np.abs(wanted), axis=axes, keepdims=True, initial=0.0, where=~np.isnan(wanted))
    scale = scale + 0.05 * np.abs(value).reshape(scale.shape) + (0.02 if REFERENCES[row].sees_text else 0.0)
    error = np.where(np.isnan(wanted), 0.0, np.abs(np.asarray(actual, np.float64) - wanted))
    assert (error <= TOLERANCE * scale + 1e-9).all(), f"{message}: {np.max(error / (scale + 1e-9)):.2g} relative"


@pytest.mark.parametrize(("row", "size"), rows_by_size(LOSSES, SIZES))
def test_value_and_gradient_follow_the_formula(row, size):
    vocab = make_vocab(size)
    lead = (1, 2) if size == 1000 else (2, 5)
    kernels = kernels_of(row, size)
    for seed in range(max(3, len(kernels)) if size <= 10 else len(kernels)):
        options, gram, kernel = kernels[seed % len(kernels)]
        logits, targets = make_batch(vocab, lead, seed, scale=(2.0, 0.1, 5.0)[seed % 3])
        targets[0, 0] = vocab.token_ids[seed % size]
        weights = np.random.default_rng(seed).uniform(0.5, 2.0, out_shape(row, lead)).astype(np.float32)
        where = None if size <= 10 else np.random.default_rng(seed).permutation(width(vocab))[:40]
        numbers = make_numbers_of(kernel, terms_of(row), gram)
        value, gradient = evaluate(row, logits, targets, kernel=kernel, weights=weights)
        wanted = REFERENCES[row].value(logits, targets, numbers)
        message = f"{row}, seed {seed}, {options}"
        chex.assert_shape([value, gradient], [out_shape(row, lead), logits.shape])
        chex.assert_type([value, gradient], jnp.float32)
        # the batch's largest value bounds the cancellation inside one small value
        np.testing.assert_allclose(
            value, wanted, rtol=TOLERANCE, atol=1e-6 * np.abs(wanted).max() + 1e-9, err_msg=message
        )
        wanted_slope = wanted_gradient(row, logits, targets, numbers, weights, where)
        assert_gradient_close(gradient, wanted_slope, wanted, row, message)


@pytest.mark.parametrize("options", kernel_options(10), ids=str)
@pytest.mark.parametrize("terms", ["smmd", "mmd", "smoothness"])
def test_the_terms_follow_their_formulas_and_add_up(terms, options):
    kernel = make_numeric_kernel(make_vocab(10), **options, terms=terms)
    numbers = make_numbers_of(kernel, terms)
    logits, targets = make_batch(make_vocab(10), seed=5)
    found = smmd_terms(logits, targets, kernel)
    mmd, smoothness = reference.smmd_parts(logits, targets, numbers)
    np.testing.assert_allclose(found.mmd, mmd, rtol=TOLERANCE, atol=1e-7)
    np.testing.assert_allclose(found.smoothness, smoothness, rtol=TOLERANCE, atol=1e-7)
    wanted = {"smmd": mmd + numbers.alpha * smoothness, "mmd": mmd, "smoothness": numbers.alpha * smoothness}[terms]
    np.testing.assert_allclose(found.total, wanted, rtol=TOLERANCE, atol=1e-7)
    np.testing.assert_array_equal(found.is_numeric, reference.numeric_index(targets, numbers)[1])
    np.testing.assert_allclose(smmd_loss(logits, targets, kernel), found.total, rtol=1e-6, atol=1e-8)


WAYS_IN = {
    "logits": lambda hidden, head, targets, kernel: smmd_loss(hidden @ head, targets, kernel),
    "hidden": smmd_loss_from_hidden,
    "columns": lambda hidden, head, targets, kernel: smmd_loss_from_numeric_logits(
        hidden @ head[:, kernel.token_ids], targets, kernel
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def values_and_both_gradients(way, *operands):
    def total(*operands):
        values = WAYS_IN[way](*operands)
        return values.sum(), values

    return jax.value_and_grad(total, (0, 1), has_aux=True)(*operands)


@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("size", [10, 300])
def test_three_ways_in_agree(size, share):
    """From logits, hidden states and numeric columns; with many numbers only the rows that hold one may be computed."""
    vocab, kernel = make_vocab(size), make_kernel(size=size)
    rng = np.random.default_rng(0)
    _, targets = make_batch(vocab, (4, 20), seed=1)
    targets = np.where(rng.random((4, 20)) < share, targets, text_ids(vocab)[0]).astype(np.int32)
    hidden = rng.standard_normal((4, 20, 7)).astype(np.float32)
    head = rng.standard_normal((7, width(vocab))).astype(np.float32)
    wanted = reference.smmd(np.float64(hidden) @ np.float64(head), targets, make_numbers_of(kernel, "smmd"))
    gradients = []
    for way in WAYS_IN:
        (_, values), both = values_and_both_gradients(way, hidden, head, targets, kernel)
        # the float32 product that makes the logits rounds first
        np.testing.assert_allclose(values, wanted, rtol=5e-5, atol=1e-6)
        gradients.append(both)
    chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-5)


# digits of precision


def confident_logits(vocab, target, missing, seed):
    """Float32 logits whose numbers leave the probability `missing` to others than the target."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(width(vocab))
    numbers = np.asarray(vocab.token_ids)
    others = numbers[numbers != target]
    logits[target] = np.log(np.exp(logits[others]).sum() * (1 - missing) / missing)
    return logits.astype(np.float32)


@pytest.mark.parametrize("missing", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize(
    ("row", "size"), rows_by_size([row for row in NUMERIC_ROWS if not REFERENCES[row].sees_text], (10, 300))
)
def test_close_to_the_target_the_digits_stay(row, size, missing):
    vocab, kernel = make_vocab(size), make_kernel(row, size)
    targets = np.asarray(vocab.token_ids)[np.random.default_rng(1).integers(0, size, (2, 5))]
    logits = np.stack(
        [[confident_logits(vocab, target, missing, seed) for target in row_] for seed, row_ in enumerate(targets)]
    )
    numbers = make_numbers_of(kernel, terms_of(row))
    value, gradient = evaluate(row, logits, targets, kernel=kernel)
    np.testing.assert_allclose(value, REFERENCES[row].value(logits, targets, numbers), rtol=1e-3)
    axes = (-1,) if LOSSES[row].needs == "position" else (-2, -1)
    if REFERENCES[row].uses_gram:
        p = reference.softmax(logits[..., numbers.token_ids].astype(np.float64))
        r = p - (targets[..., None] == numbers.token_ids)
        u = r @ numbers.form
        wanted = 2 * p * (u - (p * u).sum(axis=-1, keepdims=True))
        actual = np.asarray(gradient)[..., numbers.token_ids]
        assert (np.abs(actual - wanted) <= 1e-3 * np.abs(wanted).max(axis=axes, keepdims=True)).all()


# promises of every row


@pytest.mark.slow
class EveryVariant(chex.TestCase):
    """Each row jitted and not, with arrays on the device and in NumPy, the kernel being an argument."""

    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    @parameterized.named_parameters((row, row) for row in LOSSES)
    def test_jit_equals_eager(self, row):
        logits, targets = make_batch(make_vocab(10), seed=6)
        kernel = make_kernel(row)
        value = self.variant(LOSSES[row].function)(logits, targets, kernel)
        chex.assert_shape(value, out_shape(row, targets.shape))
        chex.assert_type(value, jnp.float32)
        chex.assert_tree_all_finite(value)
        # the fused program may round differently from single operations
        chex.assert_trees_all_close(value, LOSSES[row].function(logits, targets, kernel), rtol=2e-6, atol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters((row, row) for row in LOSSES)
    def test_gradient_under_jit_equals_eager(self, row):
        logits, targets = make_batch(make_vocab(10), seed=6)
        kernel, function = make_kernel(row), LOSSES[row].function
        gradient = jax.grad(lambda logits, targets, kernel: function(logits, targets, kernel).sum())
        actual = self.variant(gradient)(jnp.asarray(logits), targets, kernel)
        chex.assert_equal_shape([actual, logits])
        chex.assert_trees_all_close(actual, gradient(jnp.asarray(logits), targets, kernel), rtol=2e-5, atol=1e-6)


@every_row
def test_another_kernel_of_the_same_vocabulary_compiles_nothing_new(row):
    chex.clear_trace_counter()  # chex counts by name, and rows may share a function
    function = jax.jit(chex.assert_max_traces(LOSSES[row].function, n=1))
    logits, targets = make_batch(make_vocab(10))
    for sigma in (2.0, 0.5, (1.0, 4.0)):
        kernel = make_numeric_kernel(make_vocab(10), sigma=sigma, terms=terms_of(row))
        function.trace(logits, targets, kernel)


@every_row
def test_zero_at_the_target_where_the_row_says_so_and_never_below(row):
    vocab = make_vocab(10)
    _, targets = make_batch(vocab, seed=7)
    targets[0] = np.asarray(vocab.token_ids)[[0, 0, 9, 5, 0]]  # a number that begins with zeros
    targets[1] = vocab.token_ids[0]  # the number zero: both sides of a relative error vanish
    value, gradient = evaluate(row, certain_logits(targets), targets)
    chex.assert_tree_all_finite(gradient)
    if LOSSES[row].minimum_at_target:
        np.testing.assert_allclose(value, 0, atol=1e-7)
        np.testing.assert_allclose(gradient, 0, atol=1e-7)
    for seed in range(20):
        assert (np.asarray(evaluate(row, *make_batch(vocab, seed=seed))[0]) >= 0).all()


@every_row
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_gradients_are_finite_for_flat_and_for_extreme_logits(row, scale):
    logits, targets = make_batch(make_vocab(10), seed=9)
    chex.assert_tree_all_finite(evaluate(row, scale * np.sign(logits), targets))


@pytest.mark.parametrize("row", SMMD_ROWS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_largest_finite_logits_give_finite_values_and_gradients(row, dtype):
    logits, targets = make_batch(make_vocab(10), seed=9)
    chex.assert_tree_all_finite(evaluate(row, (jnp.sign(logits) * 3e38).astype(dtype), targets))


@every_row
def test_minus_infinity_on_a_text_token_is_a_token_that_cannot_be(row):
    vocab = make_vocab(10)
    logits, targets = make_batch(vocab, seed=10)
    banned = text_ids(vocab)[0]
    targets = np.where(targets == banned, text_ids(vocab)[1], targets).astype(np.int32)
    logits[..., banned] = -np.inf
    found = evaluate(row, logits, targets)
    chex.assert_tree_all_finite(found)
    far = np.where(np.isinf(logits), np.float32(-200.0), logits)
    chex.assert_trees_all_close(found, evaluate(row, far, targets), rtol=1e-6)


@every_row
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_logits_are_upcast_first(row, dtype):
    logits, targets = make_batch(make_vocab(10), seed=11)
    narrow = jnp.asarray(logits, dtype)
    value, gradient = evaluate(row, narrow, targets)
    wide_value, wide_gradient = evaluate(row, narrow.astype(jnp.float32), targets)
    chex.assert_type([value, gradient], [jnp.float32, dtype])
    # the same float32 arithmetic, fused differently
    chex.assert_trees_all_close(value, wide_value, rtol=1e-6, atol=1e-7)
    # one rounding to the logits' dtype
    rounding = jnp.finfo(dtype)
    chex.assert_trees_all_close(
        gradient.astype(jnp.float32), wide_gradient, rtol=float(rounding.eps), atol=float(rounding.tiny)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_thousand_values_survive_sixteen_bit_logits(dtype):
    vocab, kernel = make_vocab(1000), make_kernel(size=1000)
    logits, targets = make_batch(vocab, (1, 4), seed=12)
    for scale, tolerance in ((1, 1e-5), (64, 1e-3)):
        narrow = jnp.asarray(scale * logits, dtype)
        wanted = reference.smmd(np.asarray(narrow, np.float64), targets, make_numbers_of(kernel, "smmd"))
        np.testing.assert_allclose(smmd_loss(narrow, targets, kernel), wanted, rtol=tolerance)


@every_row
def test_leading_axes_are_free(row):
    logits, targets = make_batch(make_vocab(10), seed=13)
    function, kernel = compiled(row), make_kernel(row)
    value, _ = evaluate(row, logits, targets)
    deeper = function(logits[:, None, None], targets[:, None, None], kernel)
    chex.assert_shape(deeper, out_shape(row, (2, 1, 1, 5)))
    chex.assert_trees_all_close(deeper.reshape(value.shape), value, rtol=1e-6, atol=1e-7)
    index = (1, 2) if LOSSES[row].needs == "position" else 1
    least = function(logits[index], targets[index], kernel)
    chex.assert_shape(least, ())
    chex.assert_trees_all_close(least, value[index], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("row", {LOSSES[row].function: row for row in SMMD_ROWS}.values())
def test_the_custom_derivative_agrees_with_differences_to_second_order(row):
    logits, targets = make_batch(make_vocab(10), seed=14, scale=1.0)
    function = functools.partial(LOSSES[row].function, targets=targets, kernel=make_kernel(row))
    # differences of float32 values, twice
    check_grads(function, (logits,), order=2, modes=["fwd", "rev"], atol=2e-2, rtol=2e-2)


# properties

residual_seeds = st.integers(0, 2**32 - 1)
property_kernel = st.sampled_from(range(len(kernel_options(10))))


@hypothesis.given(seed=residual_seeds, scale=st.floats(0.0, 40.0), which=property_kernel)
@pytest.mark.parametrize("row", SMMD_ROWS)
def test_smmd_is_never_negative_and_zero_only_at_the_target(row, seed, scale, which):
    kernel = kernels_of(row, 10)[which][2]
    logits, targets = make_batch(make_vocab(10), (2, 5), seed, scale)
    assert (np.asarray(evaluate(row, logits, targets, kernel=kernel)[0]) >= -1e-6).all()
    np.testing.assert_allclose(evaluate(row, certain_logits(targets), targets, kernel=kernel)[0], 0, atol=1e-7)


@hypothesis.given(which=property_kernel)
@pytest.mark.parametrize("row", SMMD_ROWS)
def test_mistaking_one_number_for_another_costs_the_same_both_ways(row, which):
    vocab, kernel = make_vocab(10), kernels_of(row, 10)[which][2]
    ids = np.asarray(vocab.token_ids)
    certain = certain_logits(ids)
    table = compiled(row)(
        np.broadcast_to(certain[:, None], (10, 10, width(vocab))), np.broadcast_to(ids, (10, 10)), kernel
    )
    np.testing.assert_allclose(table, np.transpose(table), rtol=1e-6, atol=1e-7)


@hypothesis.given(seed=residual_seeds)
@hypothesis.settings(max_examples=5)
@every_numeric_row
def test_renaming_the_tokens_changes_nothing(row, seed):
    vocab = make_vocab(10)
    logits, targets = make_batch(vocab, seed=seed)
    new_id = np.random.default_rng(seed).permutation(width(vocab))
    moved = np.empty_like(logits)
    moved[..., new_id] = logits
    renamed = make_numeric_vocab(
        {str(value): int(new_id[old]) for value, old in enumerate(np.asarray(vocab.token_ids))}
    )
    kernel = make_numeric_kernel(renamed, terms=terms_of(row))
    weights = np.random.default_rng(0).uniform(0.5, 2.0, out_shape(row, targets.shape)).astype(np.float32)
    value, gradient = evaluate(row, logits, targets, weights=weights)
    renamed_targets = new_id[targets].astype(np.int32)
    again = evaluate(row, moved, renamed_targets, kernel=kernel, weights=weights, compiled=False)
    # sums over the vocabulary come in another order
    chex.assert_trees_all_close((again[0], again[1][..., new_id]), (value, gradient), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", SMMD_ROWS)
def test_a_second_spelling_of_the_target_is_free_for_the_mmd_alone(row):
    vocab = make_numeric_vocab({"5": 0, "05": 1, "9": 2}, policy="all_integers")
    kernel = make_numeric_kernel(vocab, terms=terms_of(row))
    value = LOSSES[row].function(jnp.array([-80.0, 80.0, -80.0]), jnp.asarray(0), kernel)
    assert float(value) == pytest.approx(0, abs=1e-6) if terms_of(row) == "mmd" else value > 0.1


# refusals

V = width(make_vocab(10))
BAD = {
    # name: (logits, targets, mask, error, parts of the message)
    "targets one longer": (np.zeros((2, 5, V)), np.zeros((2, 6), int), None, ValueError, [f"(2, 5, {V})", "(2, 6)"]),
    "targets without batch": (np.zeros((2, 5, V)), np.zeros(5, int), None, ValueError, [f"(2, 5, {V})", "(5,)"]),
    "targets that would broadcast": (np.zeros((2, 5, V)), np.zeros((1, 5), int), None, ValueError, ["(1, 5)"]),
    "one-hot targets": (np.zeros((2, 5, V)), np.zeros((2, 5, V), int), None, ValueError, [f"(2, 5, {V})"]),
    "no logits": (None, np.zeros((2, 5), int), None, TypeError, ["logits", "None"]),
    "no targets": (np.zeros((2, 5, V)), None, None, TypeError, ["targets", "None"]),
    "ragged logits": ([[1.0], [1.0, 2.0]], np.zeros(2, int), None, TypeError, ["logits", "list", "length"]),
    "ragged targets": (np.zeros((2, 5, V)), [[1], [1, 2]], None, TypeError, ["targets", "list", "length"]),
    "ragged mask": (np.zeros((2, 5, V)), np.zeros((2, 5), int), [[True], []], TypeError, ["mask", "list", "length"]),
    "words for logits": ("4", np.zeros((), int), None, TypeError, ["logits", "str"]),
    "words for targets": (np.zeros((2, V)), ["4", "5"], None, TypeError, ["targets", "list"]),
    "complex logits": (np.zeros((2, 5, V), complex), np.zeros((2, 5), int), None, TypeError, ["logits", "complex"]),
    "scalar logits": (np.float32(1), np.int32(1), None, ValueError, ["()"]),
    "float targets": (np.zeros((2, 5, V)), np.zeros((2, 5), np.float32), None, TypeError, ["float32"]),
    "boolean targets": (np.zeros((2, 5, V)), np.zeros((2, 5), bool), None, TypeError, ["bool"]),
    "integer logits": (np.zeros((2, 5, V), int), np.zeros((2, 5), int), None, TypeError, ["int"]),
    "integer mask": (np.zeros((2, 5, V)), np.zeros((2, 5), int), np.ones((2, 5), int), TypeError, ["int", "mask"]),
    "float mask": (
        np.zeros((2, 5, V)),
        np.zeros((2, 5), int),
        np.ones((2, 5), np.float32),
        TypeError,
        ["float32", "mask"],
    ),
    "mask of another shape": (
        np.zeros((2, 5, V)),
        np.zeros((2, 5), int),
        np.ones(5, bool),
        ValueError,
        ["(5,)", "(2, 5)"],
    ),
}


@every_row
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_operands_that_do_not_fit_are_refused_with_what_came(row, bad, wrap):
    logits, targets, mask, error, parts = BAD[bad]
    logits = logits.astype(np.float32) if getattr(logits, "dtype", None) == np.float64 else logits
    call = lambda kernel: LOSSES[row].function(logits, targets, kernel, mask=mask)
    if all(isinstance(operand, np.ndarray | np.generic) for operand in (logits, targets)):
        call = lambda kernel: wrap(LOSSES[row].function)(logits, targets, kernel, mask=mask)
    with pytest.raises(error) as caught:
        call(make_kernel(row))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@every_numeric_row
@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_a_number_beyond_the_head_names_both_widths(row, wrap):
    vocab = make_numeric_vocab({**{str(value): 40 + value for value in range(9)}, "9": 58})
    kernel = make_numeric_kernel(vocab, terms=terms_of(row))
    targets = np.zeros((2, 5), int)
    with pytest.raises(TokenRangeError, match=r"58.*56|56.*58"):
        wrap(LOSSES[row].function)(np.zeros((2, 5, 56), np.float32), targets, kernel)
    jax.eval_shape(LOSSES[row].function, np.zeros((2, 5, 59), np.float32), targets, kernel)


def test_a_head_wider_than_the_tokenizer_is_welcome():
    """60 ids, 64 columns: the padded ones are text that is never a target."""
    vocab = make_numeric_vocab({str(value): 50 + value for value in range(10)})
    logits = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    targets, kernel = np.array([50, 59, 7]), make_numeric_kernel(vocab)
    wide, narrow = smmd_loss(logits, targets, kernel), smmd_loss(logits[:, :60], targets, kernel)
    np.testing.assert_array_equal(wide, narrow)


def test_a_head_that_is_turned_round_is_told_so():
    kernel = make_kernel()
    with pytest.raises(ValueError, match=r"head\.T") as caught:
        smmd_loss_from_hidden(np.zeros((3, 8), np.float32), np.zeros((V, 8), np.float32), np.zeros(3, int), kernel)
    assert f"({V}, 8)" in str(caught.value)
    with pytest.raises(ValueError, match=r"\(9, 16\)"):
        smmd_loss_from_hidden(np.zeros((3, 8), np.float32), np.zeros((9, V), np.float32), np.zeros(3, int), kernel)
    with pytest.raises(TokenRangeError, match=rf"\b{V - 9}\b"):
        smmd_loss_from_hidden(np.zeros((3, 8), np.float32), np.zeros((8, V - 9), np.float32), np.zeros(3, int), kernel)


def test_numeric_logits_must_have_a_column_for_each_number():
    with pytest.raises(ValueError, match=rf"{V}.*10"):
        smmd_loss_from_numeric_logits(np.zeros((3, V), np.float32), np.zeros(3, int), make_kernel())


@every_numeric_row
def test_a_dictionary_is_no_kernel(row):
    with pytest.raises(TypeError, match="NumericKernel"):
        LOSSES[row].function(np.zeros((2, 5, V), np.float32), np.zeros((2, 5), int), {"5": 5})


@every_numeric_row
def test_a_bare_vocabulary_serves_where_no_kernel_is_used_and_is_refused_by_name_elsewhere(row):
    logits, targets = make_batch(make_vocab(10))
    if REFERENCES[row].uses_gram:
        with pytest.raises(TypeError, match="make_numeric_kernel"):
            LOSSES[row].function(logits, targets, make_vocab(10))
    else:
        found = LOSSES[row].function(logits, targets, make_vocab(10))
        np.testing.assert_array_equal(found, LOSSES[row].function(logits, targets, make_kernel(row)))
