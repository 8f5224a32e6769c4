"""Speed and memory that need no clock: products and arrays of the jaxpr, temporaries of the compiled program."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from smmd_jax import (
    LOSSES,
    chunked_cross_entropy_and_numeric,
    chunked_loss_sums,
    cross_entropy_loss,
    make_numeric_kernel,
    make_numeric_vocab,
    mean_from,
    numeric_mask,
    smmd_loss,
    smmd_loss_from_hidden,
    smmd_loss_from_numeric_logits,
    sum_and_count,
)
from tests.cases import NUMERIC_ROWS, POSITION_ROWS, make_batch, make_kernel, make_vocab, text_ids, width
from tests.programs import equations, products, shapes, temporaries
from tests.reference import REFERENCES

# Enough numeric tokens for the blocks of numeric rows, and a number that no other axis has.
LARGE = 300
# Bytes for vectors of one number a row.
SLACK = 2**16


@functools.cache
def make_llama_kernel(vocab_size):
    """The 1110 strings of one to three digits that Llama 3 has as tokens, on scattered ids."""
    texts = [f"{value:0{digits}d}" for digits in (1, 2, 3) for value in range(10**digits)]
    ids = np.random.default_rng(0).permutation(vocab_size)[: len(texts)]
    vocab = make_numeric_vocab({text: int(one) for text, one in zip(texts, ids, strict=True)}, policy="all_integers")
    return make_numeric_kernel(vocab)


def cross_entropy(logits, targets, kernel):
    return cross_entropy_loss(logits, targets).mean()


def optax_cross_entropy(logits, targets, kernel):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(dtype=jnp.float32)


def with_smmd(logits, targets, kernel):
    smmd = mean_from(*sum_and_count(smmd_loss(logits, targets, kernel), numeric_mask(targets, kernel)))
    return cross_entropy(logits, targets, kernel) + 3.0 * smmd


def cross_entropy_first(logits, targets, kernel):
    """The same sum, its gradients accumulated in the other order."""
    total = cross_entropy(logits, targets, kernel)
    return total + 3.0 * mean_from(*sum_and_count(smmd_loss(logits, targets, kernel), numeric_mask(targets, kernel)))


def shape_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def temporaries_of_step(function, lead, vocab_size, kernel, dtype=jnp.float32):
    """Bytes of value and gradient by the logits."""
    lead = (lead,) if isinstance(lead, int) else lead
    operands = shape_of(*lead, vocab_size, dtype=dtype), shape_of(*lead, dtype=jnp.int32), kernel
    return temporaries(jax.value_and_grad(function), *operands)


# temporaries of the compiled program


def test_smmd_over_ten_digits_adds_a_few_arrays_of_the_digits_to_cross_entropy():
    rows, vocab_size, kernel = 512, 4096, make_kernel()
    added = temporaries_of_step(with_smmd, rows, vocab_size, kernel) - temporaries_of_step(
        cross_entropy, rows, vocab_size, kernel
    )
    assert added <= 6 * rows * 10 * 4 + SLACK


@pytest.mark.parametrize("lead", [(512,), (4, 128)], ids=str)
@pytest.mark.parametrize("function", [with_smmd, cross_entropy_first])
def test_smmd_over_1110_numbers_adds_eight_arrays_of_a_quarter_of_the_rows_to_cross_entropy(function, lead):
    """With 3/16 of the rows as capacity: their gradient, itself times a weight, the two or three indices of each of its
    entries, and what the rows beyond would need. No second [..., V] either, whatever the leading axes.
    """
    vocab_size, kernel = 4096, make_llama_kernel(4096)
    added = temporaries_of_step(function, lead, vocab_size, kernel) - temporaries_of_step(
        cross_entropy, lead, vocab_size, kernel
    )
    assert added <= 8 * math.prod(lead) // 4 * 1110 * 4 + SLACK


@pytest.mark.parametrize(("dtype", "copies"), [(jnp.float32, 0), (jnp.bfloat16, 0), (jnp.float16, 1)])
def test_cross_entropy_keeps_no_float32_copy_of_the_logits_beyond_what_xla_needs(dtype, copies):
    """optax keeps two of bfloat16 logits. XLA for the CPU has no float16 maximum, so there one remains, as in optax."""
    rows, vocab_size, kernel = 512, 4096, make_kernel()
    ours = temporaries_of_step(cross_entropy, rows, vocab_size, kernel, dtype)
    theirs = temporaries_of_step(optax_cross_entropy, rows, vocab_size, kernel, dtype)
    assert ours <= copies * rows * vocab_size * 4 + SLACK
    assert ours <= (0.6 if dtype == jnp.bfloat16 else 1.0) * theirs + SLACK


def test_smmd_on_sixteen_bit_logits_costs_one_float32_copy():
    """Half of optax's cross entropy alone: XLA scatters bfloat16 in float32."""
    rows, vocab_size, kernel = 512, 4096, make_kernel()
    ours = temporaries_of_step(with_smmd, rows, vocab_size, kernel, jnp.bfloat16)
    theirs = temporaries_of_step(optax_cross_entropy, rows, vocab_size, kernel, jnp.bfloat16)
    assert ours <= 0.6 * theirs


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chunks_need_less_than_a_third_of_the_memory_of_full_logits(dtype):
    rows, vocab_size, depth, kernel = 2048, 49_152, 64, make_kernel()
    hidden, head = shape_of(rows, depth, dtype=dtype), shape_of(depth, vocab_size, dtype=dtype)
    targets, weights = shape_of(rows, dtype=jnp.int32), shape_of(rows)

    def full(hidden, head, targets, kernel, weights):
        logits = jnp.einsum("td,dv->tv", hidden, head, preferred_element_type=jnp.float32)
        numeric = smmd_loss_from_hidden(hidden, head, targets, kernel)
        return jnp.sum(weights * (cross_entropy_loss(logits, targets) + 3.0 * numeric))

    def sums(hidden, head, targets, kernel, weights):
        ce, numeric = chunked_loss_sums(hidden, head, targets, kernel, ce_weights=weights, numeric_weights=weights)
        return ce + 3.0 * numeric

    def values(hidden, head, targets, kernel, weights):
        ce, numeric = chunked_cross_entropy_and_numeric(hidden, head, targets, kernel, chunk=256)
        return jnp.sum(weights * (ce + 3.0 * numeric))

    operands = hidden, head, targets, kernel, weights
    of_full, of_sums, of_values = (
        temporaries(jax.value_and_grad(function, (0, 1)), *operands) for function in (full, sums, values)
    )
    assert of_full >= 2 * rows * vocab_size * 4
    assert of_sums <= 0.30 * of_full
    assert of_values <= 0.30 * of_full


def test_a_mask_takes_no_pass_over_the_logits_of_a_chunk():
    rows, depth, vocab_size, chunk, kernel = 24, 5, 211, 8, make_kernel()
    operands = shape_of(rows, depth), shape_of(depth, vocab_size), shape_of(rows, dtype=jnp.int32)

    def total(hidden, head, targets, mask):
        ce, numeric = chunked_cross_entropy_and_numeric(hidden, head, targets, kernel, mask=mask, chunk=chunk)
        return jnp.sum(ce + numeric)

    jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1)))(*operands, shape_of(rows, dtype=jnp.bool_)).jaxpr
    shapes_of_selects = [eq.outvars[0].aval.shape for eq in equations(jaxpr) if eq.primitive.name == "select_n"]
    assert shapes_of_selects and (chunk, vocab_size) not in shapes_of_selects


def test_memory_of_the_chunks_does_not_grow_with_the_rows():
    vocab_size, depth, kernel = 8192, 16, make_kernel()

    def sums(hidden, head, targets, kernel, weights):
        return sum(
            chunked_loss_sums(
                hidden, head, targets, kernel, ce_weights=weights, numeric_weights=weights, chunk=128
            )
        )

    few, many = (
        temporaries(
            jax.value_and_grad(sums, (0, 1)),
            shape_of(rows, depth), shape_of(depth, vocab_size), shape_of(rows, dtype=jnp.int32), kernel, shape_of(rows),
        )
        for rows in (512, 4096)
    )  # fmt: skip
    assert many - few <= 16 * (4096 - 512) * depth * 4


# arrays of the jaxpr


def value_and_gradient_of_hidden(function):
    """The gradient by hidden and head of the sum of everything that the function returns."""

    def total(hidden, head, *rest):
        return sum(jnp.sum(part) for part in jax.tree.leaves(function(hidden, head, *rest)))

    return jax.value_and_grad(total, (0, 1))


@pytest.mark.parametrize("size", [10, LARGE])
def test_smmd_from_hidden_holds_the_vocabulary_in_the_head_and_its_gradient_alone(size):
    rows, depth, vocab_size, kernel = 128, 7, 1237, make_kernel(size=size)
    operands = jnp.zeros((rows, depth)), jnp.zeros((depth, vocab_size)), jnp.zeros(rows, int), kernel
    for function in (smmd_loss_from_hidden, value_and_gradient_of_hidden(smmd_loss_from_hidden)):
        assert {shape for shape in shapes(function, *operands) if vocab_size in shape} <= {(depth, vocab_size)}


def arrays_of_chunks(form, row, rows, depth, vocab_size, chunk):
    hidden, head, targets = jnp.zeros((rows, depth)), jnp.zeros((depth, vocab_size)), jnp.zeros(rows, int)
    options = {"loss": row, "chunk": chunk}
    if form is chunked_loss_sums:
        options |= {"ce_weights": jnp.ones(rows), "numeric_weights": jnp.ones(rows)}
    function = functools.partial(form, **options)
    operands = hidden, head, targets, make_kernel(row)
    return shapes(function, *operands) | shapes(value_and_gradient_of_hidden(function), *operands)


@pytest.mark.parametrize("form", [chunked_loss_sums, chunked_cross_entropy_and_numeric])
@pytest.mark.parametrize("row", POSITION_ROWS)
def test_chunked_forms_hold_the_logits_of_one_chunk(form, row):
    rows, depth, vocab_size, chunk = 96, 5, 211, 8
    found = arrays_of_chunks(form, row, rows, depth, vocab_size, chunk)
    assert (chunk, vocab_size) in found
    larger = {shape for shape in found if math.prod(shape) > chunk * vocab_size}
    assert larger <= {(depth, vocab_size), (rows, depth), (rows // chunk, chunk, depth)}


@pytest.mark.parametrize("row", NUMERIC_ROWS)
def test_no_array_has_two_numeric_axes_for_each_position(row):
    """The kernel's matrices apart: a difference r_i - r_j of each position would be [..., N, N]."""
    size = 10 if REFERENCES[row].digits_only else 23
    vocab, kernel = make_vocab(size), make_kernel(row, size)
    logits, targets = make_batch(vocab, (3, 4))
    total = lambda logits: jnp.sum(LOSSES[row].function(logits, targets, kernel))
    for function in (total, jax.grad(total)):
        pairs = {shape for shape in shapes(function, jnp.asarray(logits)) if shape.count(size) >= 2}
        assert pairs <= {(size, size)}


# products


def smmd_forms(size):
    """Each form of SMMD as a function of one array, that array, and what else it needs."""
    vocab, kernel = make_vocab(size), make_kernel(size=size)
    logits, targets = make_batch(vocab, (4, 64))
    logits, head = jnp.asarray(logits), jnp.eye(width(vocab))
    columns = logits[..., kernel.token_ids]
    return {
        "logits": (lambda kernel, logits: smmd_loss(logits, targets, kernel), logits, kernel),
        "numeric logits": (lambda kernel, z: smmd_loss_from_numeric_logits(z, targets, kernel), columns, kernel),
        "hidden": (lambda kernel, hidden: smmd_loss_from_hidden(hidden, head, targets, kernel), logits, kernel),
    }


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("form", ["logits", "numeric logits", "hidden"])
def test_one_product_with_the_matrix_forward_and_none_backward(form, size):
    function, array, kernel = smmd_forms(size)[form]
    total = lambda kernel, array: function(kernel, array).sum()
    value = jax.make_jaxpr(total)(kernel, array)
    both = jax.make_jaxpr(jax.value_and_grad(total, 1))(kernel, array)
    if size == 10:
        assert products(value.jaxpr, (size, size)) == products(both.jaxpr, (size, size)) == 1
        return
    # Blocks without a number are skipped. One loop over the capacity, one over the rows beyond it, the latter again.
    assert products(value.jaxpr, (size, size), branch=min) == products(both.jaxpr, (size, size), branch=min) == 0
    assert products(value.jaxpr, (size, size)) == 2
    assert products(both.jaxpr, (size, size)) == 3


# many numeric tokens: blocks of the rows that hold numbers, exact for any number of them


def dense_smmd(logits, targets, kernel, mask=None):
    """Position by position: one row is too few for blocks."""
    one = lambda logits, target, live: smmd_loss(logits, target, kernel, mask=live)
    live = jnp.ones(targets.shape, bool) if mask is None else mask
    for _ in range(targets.ndim):
        one = jax.vmap(one)
    return one(logits, targets, live)


def dense_smmd_from_hidden(hidden, head, targets, kernel, mask=None):
    return dense_smmd(jnp.einsum("...d,dv->...v", hidden, head), targets, kernel, mask)


@functools.partial(jax.jit, static_argnums=0)
def values_and_gradients(function, arrays, weights, *rest):
    """The values of each position, and the gradients of their weighted sum by each of the arrays."""
    values, pull = jax.vjp(lambda *arrays: function(*arrays, *rest), *arrays)
    return values, pull(weights)


def assert_close(found, wanted, tolerance=1e-5):
    """Errors relative to the largest entry of each array."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        atol = tolerance * np.abs(other).max(initial=0) + 1e-9
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0, atol=atol)


def make_large_problem(count, lead=(4, 128), seed=0):
    """Logits, targets with exactly `count` numbers, and weights."""
    vocab, rng = make_vocab(LARGE), np.random.default_rng(seed)
    rows = math.prod(lead)
    logits = rng.standard_normal((*lead, width(vocab))).astype(np.float32)
    targets = rng.choice(text_ids(vocab), rows)
    targets[rng.permutation(rows)[:count]] = rng.choice(np.asarray(vocab.token_ids), count)
    return logits, targets.reshape(lead).astype(np.int32), rng.uniform(0.5, 2.0, lead).astype(np.float32)


ROWS, BLOCK, CAPACITY = 512, 32, 96
COUNTS = (0, 1, BLOCK, BLOCK + 1, CAPACITY, CAPACITY + 1, ROWS - 1, ROWS)


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_numeric_rows_gives_what_each_row_gives_alone(count):
    logits, targets, weights = make_large_problem(count)
    kernel = make_kernel(size=LARGE)
    is_numeric = np.asarray(numeric_mask(targets, kernel))
    assert is_numeric.sum() == count
    wanted = values_and_gradients(dense_smmd, (logits,), weights, targets, kernel)
    values, (gradient,) = values_and_gradients(smmd_loss, (logits,), weights, targets, kernel)
    assert_close((values, (gradient,)), wanted)
    np.testing.assert_array_equal(np.asarray(values)[~is_numeric], 0)
    np.testing.assert_array_equal(np.asarray(gradient)[~is_numeric], 0)
    columns = logits[..., np.asarray(kernel.token_ids)]
    found = values_and_gradients(smmd_loss_from_numeric_logits, (columns,), weights, targets, kernel)
    assert_close(found, (wanted[0], (wanted[1][0][..., kernel.token_ids],)))


@pytest.mark.parametrize("count", [0, 1, CAPACITY, CAPACITY + 1, ROWS])
def test_from_hidden_any_number_of_numeric_rows_gives_what_each_row_gives_alone(count):
    _, targets, weights = make_large_problem(count)
    kernel, rng = make_kernel(size=LARGE), np.random.default_rng(1)
    hidden = rng.standard_normal((*targets.shape, 16)).astype(np.float32)
    head = rng.standard_normal((16, width(make_vocab(LARGE)))).astype(np.float32)
    found = values_and_gradients(smmd_loss_from_hidden, (hidden, head), weights, targets, kernel)
    assert_close(found, values_and_gradients(dense_smmd_from_hidden, (hidden, head), weights, targets, kernel))


@pytest.mark.parametrize("lead", [(64,), (511,), (3, 7, 31), (500, 1), (1, 2, 193)], ids=str)
def test_rows_that_fill_no_whole_block(lead):
    logits, targets, weights = make_large_problem(math.prod(lead) - 2, lead)
    kernel = make_kernel(size=LARGE)
    found = values_and_gradients(smmd_loss, (logits,), weights, targets, kernel)
    assert_close(found, values_and_gradients(dense_smmd, (logits,), weights, targets, kernel))


def test_masked_rows_may_hold_anything_among_blocks_too():
    logits, targets, weights = make_large_problem(200)
    kernel, mask = make_kernel(size=LARGE), np.random.default_rng(5).random(targets.shape) < 0.6
    masked = lambda logits, targets, kernel: smmd_loss(logits, targets, kernel, mask=mask)
    poisoned = np.where(mask[..., None], logits, np.float32(np.nan)), np.where(mask, targets, -100)
    clean = values_and_gradients(masked, (logits,), weights, targets, kernel)
    dirty = values_and_gradients(masked, (poisoned[0],), weights, poisoned[1], kernel)
    chex.assert_trees_all_equal(dirty, clean)
    assert_close(clean, values_and_gradients(dense_smmd, (logits,), weights, targets, kernel, mask))
    np.testing.assert_array_equal(np.asarray(clean[1][0])[~mask], 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bit_logits_among_blocks_are_upcast_first(dtype):
    logits, targets, weights = make_large_problem(100)
    kernel, narrow = make_kernel(size=LARGE), jnp.asarray(logits, dtype)
    values, (gradient,) = values_and_gradients(smmd_loss, (narrow,), weights, targets, kernel)
    wanted, (wide,) = values_and_gradients(smmd_loss, (narrow.astype(jnp.float32),), weights, targets, kernel)
    chex.assert_type([values, gradient], [jnp.float32, dtype])
    np.testing.assert_allclose(values, wanted, rtol=1e-6)
    # one rounding to the logits' dtype
    np.testing.assert_allclose(gradient.astype(jnp.float32), wide, rtol=float(jnp.finfo(dtype).eps), atol=1e-7)


HEAD = np.random.default_rng(2).standard_normal((16, width(make_vocab(LARGE)))).astype(np.float32)


def of_hidden(hidden, targets, kernel):
    return smmd_loss_from_hidden(hidden, HEAD, targets, kernel)


def dense_of_hidden(hidden, targets, kernel):
    return dense_smmd_from_hidden(hidden, HEAD, targets, kernel)


def transformed(function, array, targets, kernel):
    values = lambda array: function(array, targets, kernel)
    total = lambda array: values(array).sum()
    direction = jnp.cos(array)
    moved = lambda array: jax.jvp(values, (array,), (direction,))[1]
    return {
        "jvp": jax.jvp(total, (array,), (direction,)),
        "gradient through checkpoint": jax.grad(jax.checkpoint(total))(array),
        "forward over reverse": jax.jvp(jax.grad(total), (array,), (direction,))[1],
        "reverse over reverse": jax.grad(lambda array: jnp.vdot(jax.grad(total)(array), direction))(array),
        # of each position: terms of a sum cancel, and with them its digits
        "forward over forward": jax.jvp(moved, (array,), (direction,)),
        "vmap": jax.vmap(function, (0, 0, None))(array, targets, kernel),
        "scan": jax.lax.map(lambda operands: function(*operands, kernel), (array, targets)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 60], ids=["within the capacity", "beyond it"])
@pytest.mark.parametrize(("function", "dense"), [(smmd_loss, dense_smmd), (of_hidden, dense_of_hidden)])
def test_blocks_work_under_every_transformation(function, dense, count):
    logits, targets, _ = make_large_problem(count, (2, 64))
    array, kernel = jnp.asarray(logits if function is smmd_loss else logits[..., :16]), make_kernel(size=LARGE)
    run = jax.jit(transformed, static_argnums=0)
    assert_close(run(function, array, targets, kernel), run(dense, array, targets, kernel))


@pytest.mark.slow
@pytest.mark.parametrize("function", [smmd_loss, of_hidden])
def test_blocks_give_the_same_with_and_without_jit(function):
    logits, targets, _ = make_large_problem(60, (2, 64))
    array, kernel = jnp.asarray(logits if function is smmd_loss else logits[..., :16]), make_kernel(size=LARGE)
    both = jax.value_and_grad(lambda array: function(array, targets, kernel).sum())
    assert_close(both(array), jax.jit(both)(array), tolerance=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", ["logits", "numeric logits", "hidden"])
def test_blocks_work_inside_shards(form, check_vma):
    """Each of eight shards has 64 rows, enough for blocks."""
    vocab, kernel = make_vocab(LARGE), make_kernel(size=LARGE)
    logits, targets, weights = make_large_problem(150, (8, 64))
    function, arrays = {
        "logits": (smmd_loss, (logits,)),
        "numeric logits": (smmd_loss_from_numeric_logits, (logits[..., np.asarray(kernel.token_ids)],)),
        "hidden": (smmd_loss_from_hidden, (logits, np.eye(width(vocab), dtype=np.float32))),
    }[form]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = P("data")
    specs = (rows, P(), rows, P()) if form == "hidden" else (rows, rows, P())
    sharded = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=check_vma)
    found = values_and_gradients(sharded, arrays, weights, targets, kernel)
    assert_close(found, values_and_gradients(function, arrays, weights, targets, kernel))


@pytest.mark.slow
def test_logits_sharded_over_the_vocabulary_are_never_gathered():
    """Under jit with shardings alone, the collectives move numeric columns and row indices, no [rows, V]."""
    logits, targets, _ = make_large_problem(100)
    kernel = make_kernel(size=LARGE)
    rows, vocab_size = targets.size, width(make_vocab(LARGE))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda array, *spec: jax.device_put(array, jax.sharding.NamedSharding(mesh, P(*spec)))
    padded = np.pad(logits, [(0, 0), (0, 0), (0, -vocab_size % 4)], constant_values=-30.0)
    operands = place(padded, "data", None, "tensor"), place(targets, "data"), kernel
    step = jax.jit(jax.value_and_grad(lambda *operands: smmd_loss(*operands).sum())).lower(*operands).compile()
    value, gradient = step(*operands)
    wanted, wanted_gradient = jax.value_and_grad(lambda *operands: smmd_loss(*operands).sum())(padded, targets, kernel)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-5, atol=1e-7)
    moved = [
        math.prod(int(length) for length in shape.split(",") if length)
        for line in step.as_text().splitlines()
        if " all-" in line or " collective-permute" in line
        for shape in line.split("[")[1].split("]")[:1]
    ]
    assert moved and max(moved) <= rows * LARGE
