"""The losses as pure functions: the transformations of JAX, one product of N x N, an import that loads nothing else."""

import dataclasses
import functools
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from smmd_jax import LOSSES, mean_from, numeric_mask, smmd_loss, smmd_loss_from_numeric_logits, sum_and_count
from tests import reference
from tests.cases import (
    POSITION_ROWS,
    certain_logits,
    evaluate,
    make_batch,
    make_kernel,
    make_numbers_of,
    make_vocab,
    terms_of,
    text_ids,
    width,
)
from tests.programs import products
from tests.reference import REFERENCES

every_row = pytest.mark.parametrize("row", LOSSES)
VOCAB = make_vocab(10)


def total(function):
    """The sum of a row's values, as a function of (logits, targets, kernel)."""
    return lambda logits, targets, kernel: function(logits, targets, kernel).sum()


def assert_same(found, wanted):
    """Equal up to the rounding of programs that were compiled apart, on the scale of each array."""
    for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(expected).max(initial=0.0)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * scale)


# Transformations. Rows that share a function share these programs; unoptimised, they compile in 0.6 of the time.
compile_fast = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


@compile_fast
def vmapped_values(function, logits, targets, kernels):
    return jax.vmap(function)(logits, targets, kernels)


@every_row
def test_vmap_over_logits_targets_and_kernels_equals_the_batched_call(row):
    logits, targets = make_batch(VOCAB, seed=1)
    kernels = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), make_kernel(row))
    mapped = vmapped_values(LOSSES[row].function, logits, targets, kernels)
    assert_same(mapped, evaluate(row, logits, targets)[0])


@compile_fast
def values_by_position(function, logits, targets, kernel, mask):
    return jax.vmap(lambda logits, target, mask: function(logits, target, kernel, mask=mask))(logits, targets, mask)


@pytest.mark.parametrize("row", POSITION_ROWS)
def test_vmap_over_single_positions_with_a_mask(row):
    logits, targets = make_batch(VOCAB, seed=1)
    mask = np.arange(10).reshape(2, 5) % 3 > 0
    flat = logits.reshape(10, -1), targets.ravel()
    values = values_by_position(LOSSES[row].function, *flat, make_kernel(row), mask.ravel())
    wanted, _ = evaluate(row, logits, targets, mask=mask)
    assert_same(values.reshape(2, 5), wanted)


@compile_fast
def forward_slope(function, logits, targets, kernel, tangent):
    return jax.jvp(lambda logits: total(function)(logits, targets, kernel), (logits,), (tangent,))


@every_row
def test_forward_and_reverse_mode_agree(row):
    logits, targets = make_batch(VOCAB, seed=3)
    tangent = np.random.default_rng(3).standard_normal(logits.shape).astype(np.float32)
    value, slope = forward_slope(LOSSES[row].function, logits, targets, make_kernel(row), tangent)
    values, gradient = evaluate(row, logits, targets)
    np.testing.assert_allclose(value, values.sum(), rtol=1e-6)
    np.testing.assert_allclose(slope, (gradient * tangent).sum(), rtol=1e-4, atol=1e-6)


@compile_fast
def hessian_of(function, logits, targets, kernel):
    return jax.hessian(total(function))(logits, targets, kernel)


@pytest.mark.slow
@every_row
def test_hessian_follows_the_formula(row):
    targets = np.asarray(VOCAB.token_ids)[None, [2, 7]]
    logits, _ = make_batch(VOCAB, (1, 2), seed=4, scale=1.0)
    matrix = hessian_of(LOSSES[row].function, logits, targets, make_kernel(row)).reshape(logits.size, logits.size)
    np.testing.assert_allclose(matrix, matrix.T, atol=2e-6 * max(1.0, np.abs(matrix).max()))
    if REFERENCES[row].gradient is None:
        numbers, axes = make_numbers_of(make_kernel(row), terms_of(row)), 1 if LOSSES[row].needs == "position" else 2

        def value(logits):
            return REFERENCES[row].value(logits, np.broadcast_to(targets, logits.shape[:-1]), numbers)

        blocks = reference.hessian(value, logits, axes)[0]
        if axes == 1:  # positions do not meet: their blocks stand on the diagonal
            nothing = np.zeros_like(blocks[0])
            blocks = np.block([[blocks[0], nothing], [nothing, blocks[1]]])
        np.testing.assert_allclose(matrix, blocks, atol=2e-5 * np.abs(blocks).max())


@every_row
def test_hessian_is_finite_at_the_target(row):
    targets = np.asarray(VOCAB.token_ids)[None, [0, 7]]
    logits = certain_logits(targets)
    chex.assert_tree_all_finite(hessian_of(LOSSES[row].function, logits, targets, make_kernel(row)))


@compile_fast
def checkpointed(function, logits, targets, kernel):
    return jax.value_and_grad(jax.checkpoint(total(function)))(logits, targets, kernel)


@every_row
def test_checkpoint_changes_nothing(row):
    logits, targets = make_batch(VOCAB, seed=5)
    value, gradient = checkpointed(LOSSES[row].function, logits, targets, make_kernel(row))
    values, wanted = evaluate(row, logits, targets)
    assert_same((value, gradient), (values.sum(), wanted))


@compile_fast
def scanned(function, logits, targets, kernel):
    """Values of each micro-batch and the gradient of their sum, through lax.scan."""

    def run(logits):
        def body(carry, batch):
            values = function(*batch, kernel)
            return carry + values.sum(), values

        return jax.lax.scan(body, jnp.float32(0), (logits, targets))

    (_, values), gradient = jax.value_and_grad(run, has_aux=True)(logits)
    return values, gradient


@every_row
def test_scan_over_micro_batches_equals_one_call_for_each(row):
    logits, targets = make_batch(VOCAB, (3, 2, 5), seed=6)
    found = scanned(LOSSES[row].function, logits, targets, make_kernel(row))
    wanted = [evaluate(row, *batch) for batch in zip(logits, targets, strict=True)]
    assert_same(found, jax.tree.map(lambda *parts: jnp.stack(parts), *wanted))


@compile_fast
def kernel_gradients(function, arrays, logits, targets, kernel):
    """The gradient with respect to every floating-point leaf of the kernel."""

    def run(arrays):
        vocab = dataclasses.replace(kernel.vocab, values=arrays["values"])
        rest = {name: array for name, array in arrays.items() if name != "values"}
        return total(function)(logits, targets, dataclasses.replace(kernel, vocab=vocab, **rest))

    return jax.grad(run)(arrays)


@every_row
def test_the_kernel_gets_zero_gradients(row):
    logits, targets = make_batch(VOCAB, seed=7)
    kernel = make_kernel(row)
    arrays = {"values": kernel.values, "gram": kernel.gram, "alpha": kernel.alpha, "form": kernel.form}
    gradients = kernel_gradients(LOSSES[row].function, arrays, logits, targets, kernel)
    chex.assert_trees_all_equal(gradients, jax.tree.map(jnp.zeros_like, arrays))


@every_row
def test_the_same_call_gives_the_same_bits(row):
    batch = make_batch(VOCAB, seed=8)
    chex.assert_trees_all_equal(evaluate(row, *batch), evaluate(row, *batch))


# eight devices


@functools.cache
def make_mesh(**axes):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices: XLA_FLAGS=--xla_force_host_platform_device_count=8 before jax starts")
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@compile_fast
def mean_over_shards(function, logits, targets, kernel):
    """The mean over numeric positions (or sequences) of the whole batch, cut over eight devices, and its gradient."""

    def mean(logits, targets, kernel):
        values = function(logits, targets, kernel)
        counts = numeric_mask(targets, kernel) if values.ndim == 2 else jnp.ones(values.shape, bool)
        return mean_from(*jax.lax.psum(sum_and_count(values, counts), "data"))

    specs = (P("data"), P("data"), P())
    return jax.value_and_grad(jax.shard_map(mean, mesh=make_mesh(data=8), in_specs=specs, out_specs=P()))(
        logits, targets, kernel
    )


@every_row
def test_shard_map_over_the_batch_with_the_global_mean(row):
    logits, targets = make_batch(VOCAB, (8, 5), seed=9)
    targets[1::2] = text_ids(VOCAB)[0]  # every other device has no number
    mean, gradient = mean_over_shards(LOSSES[row].function, logits, targets, make_kernel(row))
    parts = [evaluate(row, logits[i : i + 2], targets[i : i + 2]) for i in range(0, 8, 2)]
    count = numeric_mask(targets, VOCAB).sum() if LOSSES[row].needs == "position" else 8
    if not REFERENCES[row].numeric:
        keep = np.asarray(numeric_mask(targets, VOCAB))
        wanted = sum(values[keep[2 * i : 2 * i + 2]].sum() for i, (values, _) in enumerate(parts)) / count
        np.testing.assert_allclose(mean, wanted, rtol=1e-6)
        return
    wanted = sum(values.sum() for values, _ in parts) / count, jnp.concatenate([part[1] for part in parts]) / count
    assert_same((mean, gradient), wanted)


@every_row
def test_a_batch_and_vocabulary_sharded_by_the_compiler(row):
    mesh = make_mesh(data=2, tensor=4)
    logits, targets = make_batch(VOCAB, seed=10)
    placed = (
        jax.device_put(logits, NamedSharding(mesh, P("data", None, "tensor"))),
        jax.device_put(targets, NamedSharding(mesh, P("data"))),
    )
    kernel = jax.device_put(make_kernel(row), NamedSharding(mesh, P()))
    # other sums, other order
    assert_same(evaluate(row, *placed, kernel=kernel), evaluate(row, logits, targets))


def test_shard_map_over_the_vocabulary_needs_only_the_numeric_columns():
    mesh, kernel = make_mesh(tensor=8), make_kernel()
    logits, targets = make_batch(VOCAB, seed=11)

    def loss(shard, targets, kernel):
        """Each device gives those numeric columns that it holds; their sum over devices is all of them."""
        local = kernel.token_ids - jax.lax.axis_index("tensor") * shard.shape[-1]
        here = (local >= 0) & (local < shard.shape[-1])
        columns = jnp.where(here, shard[..., jnp.where(here, local, 0)], 0.0)
        return smmd_loss_from_numeric_logits(jax.lax.psum(columns, "tensor"), targets, kernel)

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P(None, None, "tensor"), P(), P()), out_specs=P())

    @jax.jit
    def run(logits, targets, kernel):
        value, pull = jax.vjp(lambda logits: sharded(logits, targets, kernel), logits)
        return value, pull(jnp.ones_like(value))[0]

    wanted = evaluate("smmd", logits, targets)
    assert_same(run(logits, targets, kernel), wanted)


# cost


def made_shapes(jaxpr):
    """(primitive, shape) of every array that is made and read again; the zero tangents of constants are made unread."""
    read = {id(atom) for equation in jaxpr.eqns for atom in equation.invars} | {id(atom) for atom in jaxpr.outvars}
    for equation in jaxpr.eqns:
        yield from ((equation.primitive.name, made.aval.shape) for made in equation.outvars if id(made) in read)
        for sub in jaxprs_in_params(equation.params):
            yield from made_shapes(sub)


@pytest.mark.parametrize(("size", "rows"), [(10, (7,)), (10, (4, 40)), (300, (7,))], ids=str)
def test_one_product_forward_and_none_backward(size, rows):
    logits, targets = make_batch(make_vocab(size), rows)
    kernel = make_kernel(size=size)
    value = jax.make_jaxpr(total(smmd_loss))(logits, targets, kernel).jaxpr
    both = jax.make_jaxpr(jax.value_and_grad(total(smmd_loss)))(logits, targets, kernel).jaxpr
    assert products(value, (size, size)) == products(both, (size, size)) == 1


@pytest.mark.parametrize("rows", [(7,), (4, 40)], ids=["few rows", "many rows"])
@pytest.mark.parametrize("size", [10, 300])
def test_no_array_of_n_by_n_is_made(size, rows):
    logits, targets = make_batch(make_vocab(size), rows)
    both = jax.make_jaxpr(jax.value_and_grad(total(smmd_loss)))(logits, targets, make_kernel(size=size)).jaxpr
    made = list(made_shapes(both))
    assert any(shape[-1:] == (size,) for _, shape in made)
    assert [entry for entry in made if entry[1][-2:] == (size, size)] == []


@pytest.mark.parametrize("row", [row for row in LOSSES if not REFERENCES[row].sees_text])
def test_rows_that_see_numbers_only_make_no_array_over_the_vocabulary_in_the_forward(row):
    logits, targets = make_batch(VOCAB)
    made = list(made_shapes(jax.make_jaxpr(LOSSES[row].function)(logits, targets, make_kernel(row)).jaxpr))
    assert [entry for entry in made if entry[1][-1:] == (width(VOCAB),)] == []


# import

LIGHT = """
import sys
import jax, jaxtyping, numpy
before = {name.partition(".")[0] for name in sys.modules}
import smmd_jax
new = {name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names
print(",".join(sorted(new)))
heavy = {"flax", "optax", "torch", "transformers", "tensorflow", "orbax", "tokenizers"}
print(",".join(sorted(heavy & set(sys.modules))))
print(jax._src.xla_bridge.backends_are_initialized())
"""


def test_import_needs_jax_numpy_and_jaxtyping_only_and_starts_no_backend():
    found = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True, timeout=120)
    new, heavy, started = found.stdout.splitlines()
    assert new == "smmd_jax"
    assert heavy == ""
    assert started == "False"


def test_every_public_name_is_listed_once():
    import smmd_jax

    assert len(smmd_jax.__all__) == len(set(smmd_jax.__all__))
    assert all(hasattr(smmd_jax, name) for name in smmd_jax.__all__)
