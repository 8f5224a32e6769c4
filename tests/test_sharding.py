"""Sharding rules: every parameter has one, eight simulated devices compute what one computes, nothing is born whole."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from smmd_jax.backbones import PRESETS, SHARDING_RULES, Decoder, DecoderConfig, parameter_shardings
from smmd_jax.backbones.sharding import parameter_path
from tests.decoders import FAMILIES, abstract_state

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, qkv_bias=True
)
MESHES = [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}]


def make_mesh(axes, kind=AxisType.Auto):
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)


@functools.partial(jax.jit, static_argnums=0)
def init(config):
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(0))))


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
def step(graphdef, parameters, ids, segments):
    logits = nnx.merge(graphdef, parameters)(ids, segment_ids=segments)
    wanted = jnp.take_along_axis(logits[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits[:, :-1], axis=-1) - wanted).mean(), logits


@functools.cache
def on_one_device():
    """Graph, parameters, batch (packed rows with padding), logits and gradient."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))
    ids = jax.random.randint(jax.random.key(1), (8, 12), 0, 40)
    segments = jnp.repeat(jnp.array([[1, 2, 3, 0]]), 3, axis=1).repeat(8, axis=0)
    parameters = init(CONFIG)
    (_, logits), gradient = step(graphdef, parameters, ids, segments)
    return graphdef, parameters, (ids, segments), logits, gradient


def distance(tree, other):
    """Norm of the difference relative to the norm of the second."""
    tree, other = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(each)]) for each in (tree, other))
    return np.linalg.norm(tree - other) / np.linalg.norm(other)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_eight_devices_are_born_sharded_and_compute_what_one_computes(axes):
    graphdef, parameters, batch, logits, gradient = on_one_device()
    mesh = make_mesh(axes)
    shardings = parameter_shardings(abstract_state(CONFIG), mesh)
    born = jax.jit(init, static_argnums=0, out_shardings=shardings)(CONFIG)
    jax.tree.map(np.testing.assert_array_equal, born, parameters)
    parts = axes.get("fsdp", 1) * axes.get("tensor", 1)
    for kernel in (born["layers"][0]["mlp"]["up_proj"]["kernel"], born["embed_tokens"]["embedding"]):
        assert kernel.addressable_shards[0].data.size * parts == kernel.size

    rows = NamedSharding(mesh, P(tuple(axis for axis in axes if axis != "tensor")))
    (_, split_logits), split_gradient = step(graphdef, born, *(jax.device_put(array, rows) for array in batch))
    np.testing.assert_allclose(split_logits, logits, atol=1e-6 * np.abs(logits).max(), rtol=0)
    assert distance(split_gradient, gradient) < 1e-6
    # Leaf by leaf the sums of both signs in q and k cancel to a tenth of their terms.
    for (path, one), many in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(split_gradient), strict=True
    ):
        assert distance(many, one) < 1e-5, parameter_path(path)


# Towers of 32 layers each.
SLOW_TO_TRACE = {name: pytest.mark.slow for name in ("qwen2.5-vl-3b", "qwen2.5-vl-7b", "llama-3.2-11b-vision")}


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=SLOW_TO_TRACE.get(name, ())) for name in PRESETS)]
)
def test_every_parameter_matches_exactly_one_rule(name):
    config = FAMILIES.get(name) or PRESETS[name]
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    state = abstract_state(config)
    shardings = parameter_shardings(state, mesh, rules=SHARDING_RULES[config.model_type])
    for leaf, sharding in zip(jax.tree.leaves(nnx.to_pure_dict(state)), jax.tree.leaves(shardings), strict=True):
        sharding.shard_shape(leaf.shape)


def test_stacked_layers_are_split_like_layers_and_not_over_the_axis_of_layers():
    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    config = dataclasses.replace(CONFIG, num_layers=2)
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), scan_layers=True)))
    stacked = parameter_shardings(state, mesh)["layers"]
    alone = parameter_shardings(abstract_state(config), mesh)["layers"][1]
    jax.tree.map(lambda many, one: np.testing.assert_equal(tuple(many.spec), (None, *one.spec)), stacked, alone)


def test_dimensions_fall_back_one_by_one():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    # 39 rows do not divide by 2; 30 columns not by 4; the mesh of the second case has no tensor axis.
    config = dataclasses.replace(CONFIG, vocab_size=39, intermediate_size=30)
    tree = parameter_shardings(abstract_state(config), mesh)
    assert tree["embed_tokens"]["embedding"].spec == P(None, "fsdp")
    assert tree["layers"][0]["mlp"]["up_proj"]["kernel"].spec == P("fsdp", "tensor")
    assert tree["layers"][0]["mlp"]["down_proj"]["kernel"].spec == P("tensor", "fsdp")
    tree = parameter_shardings(abstract_state(config), make_mesh({"data": 2, "fsdp": 4}))
    assert tree["layers"][0]["mlp"]["up_proj"]["kernel"].spec == P("fsdp", None)
    assert tree["layers"][0]["self_attn"]["q_proj"]["bias"].spec == P(None)


def test_parameters_without_or_with_two_rules_are_listed():
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    parameters = {"norm": {"weight": leaf}, "adapter": {"kernel": leaf}, "other": leaf}
    rules = [("norm/weight", (None,)), ("a.*", (None, None)), ("adapter/kernel", (None, None))]
    with pytest.raises(ValueError) as caught:
        parameter_shardings(parameters, make_mesh({"fsdp": 2}), rules=rules)
    text = str(caught.value)
    assert "adapter/kernel [8, 8]: 2 rules match" in text
    assert "norm/weight [8, 8]: its rule has 1 dimensions" in text
    assert "other [8, 8]: 0 rules match" in text


def test_explicit_axes_are_refused():
    with pytest.raises(ValueError, match="wanted AxisType"):
        parameter_shardings({}, make_mesh({"fsdp": 2}, AxisType.Explicit))
