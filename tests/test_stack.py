"""Layers in one scan and layers with rematerialisation compute what plain ones compute, and save what they promise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from smmd_jax.backbones import Decoder, DecoderConfig, stack_layers, unstack_layers
from tests.decoders import EACH_FAMILY, FAMILIES, make_decoder, padded, run, sequences
from tests.programs import equations, temporaries
from train.generate import generate

each_family = pytest.mark.parametrize("family", EACH_FAMILY)


@functools.cache
def graphdef_of(config, **options):
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options)))


def parameters_of(family):
    return nnx.to_pure_dict(nnx.state(make_decoder(family)))


def scanned(family, **options):
    """The decoder of this family with the same parameters, stacked."""
    graphdef = graphdef_of(FAMILIES[family], scan_layers=True, **options)
    return nnx.merge(graphdef, stack_layers(parameters_of(family)))


def loss_of(graphdef, parameters, batch, key=None):
    rngs = None if key is None else nnx.Rngs(key)
    logits = nnx.merge(graphdef, parameters)(**batch, rngs=rngs)
    return (jnp.square(logits) * (batch["input_ids"] > 5)[..., None]).mean()


value_and_gradient = functools.partial(jax.jit, static_argnums=0)(
    lambda graphdef, *operands: jax.value_and_grad(functools.partial(loss_of, graphdef))(*operands)
)


def assert_near(found, wanted, tolerance):
    """Leaf by leaf, relative to the norm of the leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


@each_family
def test_a_scan_over_layers_equals_unrolled_layers_in_logits_and_gradients(family):
    model, stacked = make_decoder(family), scanned(family)
    batch = padded(sequences(), "left")
    logits = run(model, **batch)
    np.testing.assert_allclose(run(stacked, **batch), logits, atol=1e-5 * np.abs(logits).max(), rtol=0)
    value, gradient = value_and_gradient(nnx.graphdef(model), parameters_of(family), batch)
    other, stacked_gradient = value_and_gradient(nnx.graphdef(stacked), stack_layers(parameters_of(family)), batch)
    np.testing.assert_allclose(other, value, rtol=1e-6)
    assert_near(unstack_layers(stacked_gradient), gradient, 1e-5)


@each_family
def test_stacked_layers_generate_the_same_tokens(family):
    batch = padded(sequences(), "left")
    found, wanted = (
        generate(model, **batch, max_new_tokens=6) for model in (scanned(family), make_decoder(family))
    )
    np.testing.assert_array_equal(found, wanted)


def test_packed_rows_and_given_positions_reach_every_layer_of_a_scan():
    rows = np.array(sequences((12,)), np.int32)
    batch = dict(input_ids=rows, segment_ids=np.repeat([[1, 2]], 6, axis=1), positions=np.arange(12)[None] + 3)
    logits = run(make_decoder("gemma3_text"), **batch)
    np.testing.assert_allclose(
        run(scanned("gemma3_text"), **batch), logits, atol=1e-5 * np.abs(logits).max(), rtol=0
    )


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("remat", ["full", "dots"])
@pytest.mark.parametrize("family", ["smollm3", "gemma3_text"])
def test_rematerialisation_changes_neither_loss_nor_gradient(family, remat, scan_layers):
    parameters = stack_layers(parameters_of(family)) if scan_layers else parameters_of(family)
    batch = padded(sequences(), "right")
    config = dataclasses.replace(FAMILIES[family], dropout=0.3)
    key = jax.random.key(0)
    value, gradient = value_and_gradient(graphdef_of(config, scan_layers=scan_layers), parameters, batch, key)
    graphdef = graphdef_of(config, scan_layers=scan_layers, remat=remat)
    again, same = value_and_gradient(graphdef, parameters, batch, key)
    np.testing.assert_allclose(again, value, rtol=1e-6)
    assert_near(same, gradient, 1e-6)


def test_dropout_draws_the_same_in_a_scan():
    config, batch = dataclasses.replace(FAMILIES["tiny"], dropout=0.5), padded(sequences(), "right")
    key, parameters = jax.random.key(3), parameters_of("tiny")
    value, _ = value_and_gradient(graphdef_of(config), parameters, batch, key)
    other, _ = value_and_gradient(graphdef_of(config, scan_layers=True), stack_layers(parameters), batch, key)
    np.testing.assert_allclose(other, value, rtol=1e-6)


@functools.cache
def temporaries_of(**options):
    config = DecoderConfig(vocab_size=64, hidden_size=64, intermediate_size=256, num_layers=6, num_heads=4)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options)))
    batch = {"input_ids": jax.ShapeDtypeStruct((8, 128), jnp.int32)}
    return temporaries(jax.grad(functools.partial(loss_of, graphdef)), nnx.to_pure_dict(state), batch)


def test_rematerialisation_shrinks_the_temporaries_of_a_scan():
    full, dots, none = (temporaries_of(scan_layers=True, remat=remat) for remat in ("full", "dots", "none"))
    assert full < 0.4 * none and full < dots < none


def test_a_scan_has_one_layer_in_its_program_and_starts_from_the_same_parameters():
    config = DecoderConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=5, num_heads=2)
    ids = jnp.ones((1, 4), jnp.int32)

    def products(model):
        jaxpr = jax.make_jaxpr(lambda ids: model.hidden(ids))(ids).jaxpr
        return sum(equation.primitive.name == "dot_general" for equation in equations(jaxpr))

    plain, stacked = Decoder(config, rngs=nnx.Rngs(0)), Decoder(config, rngs=nnx.Rngs(0), scan_layers=True)
    assert products(plain) == 5 * products(stacked)
    pure = nnx.to_pure_dict(nnx.state(stacked))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(pure), nnx.to_pure_dict(nnx.state(plain)))


def test_stacking_and_unstacking_keep_numpy_and_the_other_parameters():
    parameters = {"norm": np.ones(2), "layers": {"1": {"w": np.ones(3)}, "0": {"w": np.zeros(3)}}}
    stacked = stack_layers(parameters)
    assert isinstance(stacked["layers"]["w"], np.ndarray) and stacked["norm"] is parameters["norm"]
    np.testing.assert_array_equal(stacked["layers"]["w"], [[0] * 3, [1] * 3])
    assert list(unstack_layers(stacked)["layers"]) == [0, 1]


@pytest.mark.parametrize(
    ("function", "layers", "message"),
    [
        (stack_layers, {"w": np.ones((2, 3))}, "layers are named w: wanted 0, 1, 2"),
        (stack_layers, {0: {"w": np.ones(3)}, 2: {"w": np.ones(3)}}, "named 0, 2"),
        (stack_layers, {}, "named .none."),
        (stack_layers, {0: {"w": np.ones(3)}, 1: {"v": np.ones(3)}}, "same parameters"),
        (unstack_layers, {0: {"w": np.ones(3)}}, "not stacked"),
        (unstack_layers, {"v": np.ones((2, 3)), "w": np.ones((3, 3))}, r"\[2, 3\] layers"),
    ],
)
def test_what_cannot_be_stacked_or_unstacked_is_refused(function, layers, message):
    with pytest.raises(ValueError, match=message):
        function({"layers": layers})


def test_an_unknown_remat_lists_the_known_ones():
    with pytest.raises(ValueError, match="wanted one of none, full, dots"):
        Decoder(FAMILIES["tiny"], rngs=nnx.Rngs(0), remat="all")
