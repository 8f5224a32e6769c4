"""One optimizer step, as a pure function: counts first, micro-batches in a scan, one update if it is finite."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from train.data import Batch
from train.objective import Objective, Sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that an optimizer step changes.

    Attributes:
      parameters: nested dict of arrays.
      optimizer: optax state.
      step: how many updates were applied; it also seeds dropout, so that a resumed run draws what it would have drawn.
      is_finite: false from the first non-finite loss or gradient on; a step then changes nothing any more.
    """

    parameters: Any
    optimizer: Any
    step: Int[Array, ""]
    is_finite: Bool[Array, ""]


Step = Callable[[TrainState, Batch, Any], tuple[TrainState, dict[str, Array]]]


def init_state(parameters: Any, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(parameters, optimizer.init(parameters), jnp.zeros((), jnp.int32), jnp.ones((), bool))


def make_step(
    graphdef: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    grad_accum: int = 1,
    seed: int = 0,
    micro_batch_sharding: NamedSharding | None = None,
) -> Step:
    """Make the step (state, batch, kernel) -> (state, metrics); jit it with the state donated.

    The gradient does not depend on `grad_accum`: every sum is weighed with counts of the whole batch, so the gradients
    of micro-batches simply add. Micro-batch i holds the rows i, i + grad_accum, ... (so that a batch sharded by rows
    stays so). Only dropout, whose draws belong to positions of a micro-batch, sees the cut.

    Args:
      graphdef: the model without its parameters.
      objective: what is minimised.
      optimizer: the update rule.
      grad_accum: micro-batches, a divisor of the batch's rows.
      seed: of dropout.
      micro_batch_sharding: sharding of the rows of a micro-batch.

    Returns:
      The step. Its metrics are scalars: those of `Objective.metrics`, `grad_norm`, and `is_finite`.
    """

    def sums_of(parameters: Any, batch: Batch, kernel: Any, key: Array) -> Sums:
        model = nnx.merge(graphdef, parameters)
        hidden = model.hidden(
            batch.input_ids, positions=batch.positions, segment_ids=batch.segment_ids, rngs=nnx.Rngs(key)
        )
        return objective.sums(model, hidden, batch, kernel)

    def over_micro_batches(function: Callable[[Batch, Array], Any], batch: Batch, key: Array) -> Any:
        """Add up a function of micro-batches; its result must be a tree of arrays."""
        if grad_accum == 1:
            return function(batch, key)
        parts = jax.tree.map(lambda array: _cut(array, grad_accum, micro_batch_sharding), batch)
        keys = jax.random.split(key, grad_accum)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(function, jax.tree.map(lambda array: array[0], parts), keys[0]),
        )

        def add(total, operands):
            return jax.tree.map(jnp.add, total, function(*operands)), None

        return lax.scan(add, zeros, (parts, keys))[0]

    def step(state: TrainState, batch: Batch, kernel: Any) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        counts = objective.counts(batch, kernel)
        sums = None
        if objective.needs_values:
            sums = over_micro_batches(lambda part, key: sums_of(state.parameters, part, kernel, key), batch, key)
        coefficients = objective.coefficients(counts, sums)

        def gradient_of(part: Batch, key: Array) -> tuple[Sums, Any]:
            sums, pull = jax.vjp(lambda parameters: sums_of(parameters, part, kernel, key), state.parameters)
            return sums, pull(coefficients)[0]

        sums, gradient = over_micro_batches(gradient_of, batch, key)
        metrics = objective.metrics(sums, counts, coefficients)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        is_finite = state.is_finite & jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        metrics["is_finite"] = is_finite

        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.parameters)
        updated = TrainState(
            optax.apply_updates(state.parameters, updates), optimizer_state, state.step + 1, state.is_finite
        )
        # A NaN stays in Adam's moments for ever: neither they nor the parameters may see it.
        kept = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), updated, state)
        return dataclasses.replace(kept, is_finite=is_finite), metrics

    return step


def _cut(array: Array, parts: int, sharding: NamedSharding | None) -> Array:
    rows = array.shape[0]
    cut = array.reshape(rows // parts, parts, *array.shape[1:]).swapaxes(0, 1)
    if sharding is None:
        return cut
    return lax.with_sharding_constraint(cut, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)))
