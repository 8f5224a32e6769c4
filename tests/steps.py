"""One optimizer step of a small model on simulated devices, for tests that compare ways to take it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from smmd_jax.backbones import (
    BACKBONES,
    SHARDING_RULES,
    add_lora,
    parameter_shardings,
    split_trainable,
)
from tests.test_step import kernel_of
from train.objective import make_objective
from train.partition import batch_sharding, make_mesh, optimizer_shardings, replicated
from train.step import TrainState, init_state, make_step

# Its state is the gradient and its update nothing: differences of parameters would lose the last digits.
RECORD = optax.GradientTransformation(
    init=lambda parameters: jax.tree.map(jnp.zeros_like, parameters),
    update=lambda gradient, state, parameters: (jax.tree.map(jnp.zeros_like, gradient), gradient),
)


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What one step made: gradients (trained parameters), metrics, the new state on its devices, the program."""

    gradient: dict | None
    metrics: dict
    state: TrainState
    program: jax.stages.Compiled


def take_step(
    config,
    batch,
    *,
    mesh=None,
    loss="smmd",
    logits="dense",
    grad_accum=1,
    optimizer=RECORD,
    lora_rank=0,
    seed=0,
    **model,
):
    """Take one step from the same parameters, whatever the mesh; the gradient is kept by the default optimizer.

    `model`: scan_layers, remat, dtype of the decoder. Parameters are drawn with random norms and biases.
    """
    mesh = make_mesh(mesh or {})

    def build():
        made = BACKBONES[config.model_type](config, rngs=nnx.Rngs(seed), rows=batch_sharding(mesh), **model)
        return add_lora(made, rank=lora_rank, rngs=nnx.Rngs(seed)) if lora_rank else made

    graphdef, like = nnx.split(nnx.eval_shape(build))
    like = nnx.to_pure_dict(like)
    shardings = parameter_shardings(like, mesh, rules=SHARDING_RULES[config.model_type])
    trained, frozen = split_trainable(_drawn(build, seed))
    trained_shardings, frozen_shardings = split_trainable(shardings)
    everywhere = replicated(mesh)
    state_shardings = TrainState(
        trained_shardings, optimizer_shardings(optimizer, trained, trained_shardings, mesh), everywhere, everywhere
    )
    objective = dataclasses.replace(make_objective(loss), logits=logits, mesh=mesh)
    step = make_step(graphdef, objective, optimizer, grad_accum=grad_accum, micro_batch_sharding=batch_sharding(mesh))
    state = jax.device_put(init_state(trained, optimizer), state_shardings)
    operands = (
        state,
        jax.device_put(batch, batch_sharding(mesh)),
        jax.device_put(kernel_of(loss), everywhere),
        jax.device_put(frozen, frozen_shardings),
    )
    program = jax.jit(step, out_shardings=(state_shardings, everywhere)).lower(*operands).compile()
    new, metrics = program(*operands)
    gradient = jax.device_get(new.optimizer) if optimizer is RECORD else None
    return Stepped(gradient, jax.device_get(metrics), new, program)


def _drawn(build, seed):
    """Parameters on the host, none of them at 0 or 1, where a forgotten one would not show."""
    rng = np.random.default_rng(seed)
    drawn = nnx.to_pure_dict(nnx.state(build()))
    return jax.tree.map(
        lambda leaf: np.asarray(leaf + np.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype)), drawn
    )


def assert_same_step(found: Stepped, wanted: Stepped, *, rtol: float):
    """Metrics relatively, gradients relative to the largest entry of each array."""
    for name, value in wanted.metrics.items():
        np.testing.assert_allclose(found.metrics[name], value, rtol=rtol, err_msg=name)
    pairs = zip(jax.tree_util.tree_leaves_with_path(wanted.gradient), jax.tree.leaves(found.gradient), strict=True)
    for (path, one), other in pairs:
        np.testing.assert_allclose(
            other, one, rtol=0, atol=rtol * np.abs(one).max(), err_msg=jax.tree_util.keystr(path)
        )
