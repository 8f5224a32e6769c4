"""Rates follow their schedules, gradients are clipped, and stacked layers are treated as the layers they are."""

import jax
import numpy as np
import optax
import pytest

from smmd_jax.backbones import stack_layers
from train.optimizer import make_optimizer, make_schedule


def tree(seed, shift=0.0):
    rng = np.random.default_rng(seed)
    array = lambda *shape: np.float32(rng.normal(size=shape) + shift)
    layer = lambda: {"mlp": {"up_proj": {"kernel": array(6, 9)}}, "input_layernorm": {"weight": array(6)}}
    layers = {0: layer(), 1: layer()}
    return {"embed_tokens": {"embedding": array(7, 6)}, "layers": layers, "norm": {"weight": array(6)}}


def after_two_updates(optimizer, parameters, *gradients):
    @jax.jit
    def update(parameters, state, gradient):
        updates, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state

    state = optimizer.init(parameters)
    for gradient in gradients:
        parameters, state = update(parameters, state, gradient)
    return parameters


# Not adafactor: it limits the update of each array as a whole, and a stack is one array.
@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_stacked_layers_move_as_layers_apart(name):
    optimizer = make_optimizer(name, optax.constant_schedule(0.1), weight_decay=0.5, clip_norm=1.0)
    # Far from 0, so that decay shows: of the norms it would be wrong.
    parameters, gradients = tree(0, shift=3.0), (tree(1), tree(2))
    apart = after_two_updates(optimizer, parameters, *gradients)
    stacked = after_two_updates(optimizer, stack_layers(parameters), *map(stack_layers, gradients))
    near = lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    jax.tree.map(near, stacked, stack_layers(apart))


def test_norms_are_not_decayed():
    optimizer = make_optimizer("sgd", optax.constant_schedule(0.1), weight_decay=0.5, clip_norm=0.0)
    parameters = stack_layers(tree(0, shift=3.0))
    zeros = jax.tree.map(np.zeros_like, parameters)
    after = after_two_updates(optimizer, parameters, zeros)
    norms = [parameters["layers"]["input_layernorm"]["weight"], after["layers"]["input_layernorm"]["weight"]]
    np.testing.assert_array_equal(*norms)
    kernels = [parameters["layers"]["mlp"]["up_proj"]["kernel"], after["layers"]["mlp"]["up_proj"]["kernel"]]
    np.testing.assert_allclose(kernels[1], 0.95 * kernels[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, *(0.5 * (1 + np.cos(np.pi * np.array([1, 2, 3]) / 4)))]),
    ],
)
def test_rates_rise_to_the_largest_and_follow_the_named_shape(name, wanted):
    schedule = make_schedule(name, learning_rate=1e-2, warmup_steps=4, steps=8)
    # The last update of the warm-up and the first one after it both have the largest rate.
    found = [float(schedule(step)) for step in (0, 1, 2, 3, 5, 6, 7)]
    np.testing.assert_allclose(found, 1e-2 * np.array(wanted), rtol=1e-6)
    assert float(schedule(4)) == pytest.approx(1e-2)
    np.testing.assert_allclose(float(make_schedule(name, learning_rate=1e-2, warmup_steps=0, steps=8)(0)), 1e-2)


@pytest.mark.parametrize(("clip_norm", "norm"), [(0.5, 0.5), (100.0, 2.0), (0.0, 2.0)])
def test_gradients_are_clipped_by_their_global_norm(clip_norm, norm):
    optimizer = make_optimizer("sgd", optax.constant_schedule(1.0), weight_decay=0.0, clip_norm=clip_norm)
    parameters, gradient = tree(0), tree(1)
    gradient = jax.tree.map(lambda leaf: leaf * (2.0 / optax.tree.norm(gradient)), gradient)
    updates, _ = optimizer.update(gradient, optimizer.init(parameters), parameters)
    np.testing.assert_allclose(optax.tree.norm(updates), norm, rtol=1e-5)
    scaled = lambda found, whole: np.testing.assert_allclose(found, -whole * norm / 2, rtol=1e-5)
    jax.tree.map(scaled, updates, gradient)
