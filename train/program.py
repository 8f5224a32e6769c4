"""The jitted step of a run with the shapes and shardings of what it takes: one way to make it, with or without data."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from train.data import Batch
from train.objective import Objective
from train.parameters import Parameters, shardings_of
from train.partition import batch_sharding, optimizer_shardings, replicated
from train.step import Step, TrainState, init_state, make_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The step and the state it changes.

    Attributes:
      state_like: `TrainState` of ShapeDtypeStruct with shardings.
      make_state: () -> a fresh `TrainState`, born sharded.
      step: jitted, the state donated: (state, batch, kernel, frozen) -> (state, metrics).
      frozen_like: ShapeDtypeStruct of the step's last argument.
    """

    state_like: TrainState
    make_state: Callable[[], TrainState]
    step: Step
    frozen_like: dict

    def lower(self, batch: Batch, kernel: Any) -> jax.stages.Lowered:
        """Lower the step for operands that may be ShapeDtypeStruct; no array is made."""
        return self.step.lower(self.state_like, batch, kernel, self.frozen_like)


def make_program(
    parameters: Parameters,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    grad_accum: int = 1,
    seed: int = 0,
) -> Program:
    """Make the step of these parameters on a mesh, whose devices need not be there.

    Args:
      grad_accum, seed: as `train.step.make_step`.
    """
    everywhere = replicated(mesh)
    parameter_sharding = shardings_of(parameters.trainable_like)
    state_shardings = TrainState(
        parameters=parameter_sharding,
        optimizer=optimizer_shardings(optimizer, parameters.trainable_like, parameter_sharding, mesh),
        step=everywhere,
        is_finite=everywhere,
    )
    start = functools.partial(init_state, optimizer=optimizer)
    state_like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(start, parameters.trainable_like),
        state_shardings,
    )
    placed_start = jax.jit(start, donate_argnums=0, out_shardings=state_shardings)
    step = make_step(
        parameters.graphdef,
        objective,
        optimizer,
        grad_accum=grad_accum,
        seed=seed,
        micro_batch_sharding=batch_sharding(mesh),
    )
    return Program(
        state_like=state_like,
        make_state=lambda: placed_start(parameters.make_trainable()),
        step=jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, everywhere)),
        frozen_like=parameters.frozen_like,
    )


def batch_like(batch_size: int, max_length: int, mesh: Mesh) -> Batch:
    """Describe a batch of packed rows, the rows over data and fsdp."""
    rows = batch_sharding(mesh)
    array = lambda dtype: jax.ShapeDtypeStruct((batch_size, max_length), dtype, sharding=rows)
    return Batch(
        input_ids=array(jnp.int32),
        targets=array(jnp.int32),
        target_mask=array(jnp.bool_),
        positions=array(jnp.int32),
        segment_ids=array(jnp.int32),
    )
