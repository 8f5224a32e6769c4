"""Optimizers treat stacked layers as the layers they are: matrices are decayed and made orthogonal one by one."""

import jax
import numpy as np
import optax
import pytest

from smmd_jax.backbones import stack_layers
from train.optimizer import make_optimizer


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
