"""Adapters: nothing at first, the same as a merged matrix later, beside layers of either form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from smmd_jax.backbones import (
    LORA_TARGETS,
    Decoder,
    add_lora,
    join_parameters,
    lora_scale,
    merge_lora,
    parameter_shardings,
    split_trainable,
    stack_layers,
    unstack_layers,
)
from tests.decoders import FAMILIES, make_decoder, run, sequences

FAMILY = "biased"  # biases on every matrix: the wrapped layer must keep them
IDS = np.array(sequences((9,)), np.int32)


def pure(model):
    return nnx.to_pure_dict(nnx.state(model))


def adapted(family=FAMILY, **options):
    """The decoder of this family with adapters, without touching the cached one."""
    graphdef, state = nnx.split(make_decoder(family))
    return add_lora(nnx.merge(graphdef, state), **{"rank": 3, "rngs": nnx.Rngs(5), **options})


def moved(parameters, seed=0):
    """The same parameters with every B away from 0."""
    rng = np.random.default_rng(seed)

    def move(path, leaf):
        is_b = jax.tree_util.keystr(path[-1:]) == "['lora_b']"
        return leaf + rng.normal(size=leaf.shape).astype(np.float32) if is_b else leaf

    return jax.tree_util.tree_map_with_path(move, parameters)


def test_adapters_change_nothing_at_first():
    np.testing.assert_array_equal(run(adapted(), input_ids=IDS), run(make_decoder(FAMILY), input_ids=IDS))


@pytest.mark.parametrize("alpha", [None, 1.5])
def test_moved_adapters_add_their_product_and_equal_the_merged_matrix(alpha):
    model = adapted(alpha=alpha)
    parameters = moved(pure(model))
    scale = lora_scale(3, alpha)
    assert scale == (2.0 if alpha is None else 0.5)
    layer = parameters["layers"][0]["mlp"]["up_proj"]
    merged = merge_lora(parameters, scale)
    wanted = np.asarray(layer["kernel"], np.float64) + scale * np.asarray(layer["lora_a"], np.float64) @ layer["lora_b"]
    np.testing.assert_allclose(merged["layers"][0]["mlp"]["up_proj"]["kernel"], wanted, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(merged) == jax.tree.structure(pure(make_decoder(FAMILY)))

    logits = run(nnx.merge(nnx.graphdef(model), parameters), input_ids=IDS)
    plain = run(nnx.merge(nnx.graphdef(make_decoder(FAMILY)), merged), input_ids=IDS)
    np.testing.assert_allclose(logits, plain, atol=1e-5 * np.abs(plain).max(), rtol=0)
    assert np.abs(logits - run(make_decoder(FAMILY), input_ids=IDS)).max() > 0.1


@pytest.mark.slow
def test_stacked_layers_take_the_same_adapters_and_merge_the_same():
    plain = adapted("smollm3", rank=2)
    parameters = moved(pure(plain))
    stacked = stack_layers(parameters)
    scanned = add_lora(Decoder(FAMILIES["smollm3"], rngs=nnx.Rngs(0), scan_layers=True), rank=2, rngs=nnx.Rngs(5))
    for name in ("q_proj", "o_proj"):  # A has not moved
        found = pure(scanned)["layers"]["self_attn"][name]["lora_a"]
        np.testing.assert_array_equal(found, stacked["layers"]["self_attn"][name]["lora_a"])
    logits = run(nnx.merge(nnx.graphdef(plain), parameters), input_ids=IDS)
    found = run(nnx.merge(nnx.graphdef(scanned), stacked), input_ids=IDS)
    np.testing.assert_allclose(found, logits, atol=1e-5 * np.abs(logits).max(), rtol=0)
    merged = unstack_layers(merge_lora(stacked, 2.0))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(near, merged, merge_lora(parameters, 2.0))


def test_merging_rounds_once_to_the_dtype_of_the_matrix():
    kernel, a, b = (np.random.default_rng(0).normal(size=shape) for shape in ((8, 6), (8, 2), (2, 6)))
    kernel = jnp.asarray(kernel, jnp.bfloat16)
    tree = {"q_proj": {"kernel": kernel, "lora_a": jnp.float32(a), "lora_b": jnp.float32(b)}}
    found = merge_lora(tree, 0.5)["q_proj"]["kernel"]
    exact = (np.asarray(kernel, np.float64) + 0.5 * a @ b).astype(np.float32)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.asarray(exact, jnp.bfloat16))


def test_only_the_named_targets_have_adapters_and_the_others_start_the_same():
    trainable, frozen = split_trainable(pure(adapted(targets=("v_proj", "down_proj"))))
    layer = trainable["layers"][0]
    assert set(layer["self_attn"]) == {"v_proj"} and set(layer["mlp"]) == {"down_proj"}
    assert set(trainable) == {"layers"} and "lora_a" not in frozen["layers"][0]["mlp"]["down_proj"]
    everywhere, _ = split_trainable(pure(adapted()))
    for block, name in (("self_attn", "v_proj"), ("mlp", "down_proj")):
        one, other = (tree["layers"][0][block][name]["lora_a"] for tree in (trainable, everywhere))
        np.testing.assert_array_equal(one, other)
        assert np.abs(one).max() <= one.shape[0] ** -0.5 and np.std(one) > 0.4 * one.shape[0] ** -0.5


def test_split_and_join_undo_each_other_and_without_adapters_everything_is_trained():
    parameters = pure(adapted())
    trainable, frozen = split_trainable(parameters)
    joined = join_parameters(trainable, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(parameters)
    jax.tree.map(np.testing.assert_array_equal, joined, parameters)
    assert jax.tree.structure(frozen) == jax.tree.structure(pure(make_decoder(FAMILY)))
    plain = pure(make_decoder(FAMILY))
    assert split_trainable(plain) == (plain, {})
    with pytest.raises(ValueError, match="kernel is trainable and frozen"):
        join_parameters({"norm": {"kernel": 1}}, {"norm": {"kernel": 2}})


@pytest.mark.parametrize("scan_layers", [False, True])
def test_adapters_are_split_where_their_matrix_is(scan_layers):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = nnx.eval_shape(
        lambda: add_lora(
            Decoder(FAMILIES["qwen2"], rngs=nnx.Rngs(0), scan_layers=scan_layers), rank=2, rngs=nnx.Rngs(1)
        )
    )
    layers = parameter_shardings(nnx.state(model), mesh)["layers"]
    layer, lead = (layers, (None,)) if scan_layers else (layers[0], ())
    for block, name in (("self_attn", "k_proj"), ("self_attn", "o_proj"), ("mlp", "gate_proj"), ("mlp", "down_proj")):
        specs = {leaf: tuple(sharding.spec) for leaf, sharding in layer[block][name].items()}
        *_, inner, outer = specs["kernel"]
        assert {inner, outer} == {"fsdp", "tensor"}
        assert specs["lora_a"] == (*lead, inner, None) and specs["lora_b"] == (*lead, None, outer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(targets=("q_proj", "head")), "named 'head'; known: " + ", ".join(LORA_TARGETS)),
        (dict(targets=()), "none given"),
        (dict(targets="lm_head"), "named 'lm_head'; known"),
        (dict(rank=0), "rank of the adapters is 0"),
        (dict(rank=1.5), "rank of the adapters is 1.5, wanted at least 1, a whole number"),
        (dict(rank="4"), "rank of the adapters is '4'"),
        (dict(rank=True), "rank of the adapters is True"),
        (dict(alpha=float("nan")), "alpha of the adapters is nan"),
        (dict(alpha=float("inf")), "alpha of the adapters is inf"),
        (dict(alpha="4"), "alpha of the adapters is '4'"),
        (dict(alpha=0.0), "alpha of the adapters is 0.0"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        adapted(**options)


def test_a_second_adapter_and_halves_of_one_are_refused():
    with pytest.raises(ValueError, match="q_proj has an adapter already"):
        add_lora(adapted(), rank=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a/q_proj has only lora_a, kernel"):
        merge_lora({"a": {"q_proj": {"kernel": 1, "lora_a": 2}}}, 1.0)
    with pytest.raises(ValueError, match="hold no adapters"):
        merge_lora(pure(make_decoder(FAMILY)), 1.0)
