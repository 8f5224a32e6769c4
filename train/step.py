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

from smmd_jax.backbones import join_parameters
from train.data import Batch
from train.objective import Objective, Sums


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that an optimizer step changes.

    Attributes:
      parameters: nested dict of arrays, those that are trained.
      optimizer: optax state.
      step: how many updates were applied; it also seeds dropout, so that a resumed run draws what it would have drawn.
      is_finite: false from the first non-finite loss or gradient on; a step then changes nothing any more.
    """

    parameters: Any
    optimizer: Any
    step: Int[Array, ""]
    is_finite: Bool[Array, ""]


Step = Callable[..., tuple[TrainState, dict[str, Array]]]


def init_state(parameters: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Start the optimizer, whose moments are float32 whatever dtype the parameters are stored in."""
    return TrainState(parameters, optimizer.init(_wide(parameters)), jnp.zeros((), jnp.int32), jnp.ones((), bool))


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def make_step(
    graphdef: nnx.GraphDef,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    grad_accum: int = 1,
    seed: int = 0,
    micro_batch_sharding: NamedSharding | None = None,
) -> Step:
    """Make the step (state, batch, kernel, frozen=None) -> (state, metrics); jit it with the state donated.

    `frozen` is a nested dict of the parameters that are not trained: an argument of its own, so that it is neither
    donated nor differentiated, and has no optimizer state. Gradients add up in float32, and the optimizer sees
    gradients and parameters in float32; what it returns is rounded once, to the dtype that is stored.

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

    def hidden_of(parameters: Any, frozen: Any, batch: Batch, key: Array) -> tuple[nnx.Module, Array]:
        model = nnx.merge(graphdef, join_parameters(parameters, frozen))
        # Models take the three axes of a position first, batches the rows.
        positions = batch.positions if batch.positions.ndim == 2 else jnp.moveaxis(batch.positions, 1, 0)
        return model, model.hidden(
            batch.input_ids,
            positions=positions,
            segment_ids=batch.segment_ids,
            images=batch.images,
            rngs=nnx.Rngs(key),
        )

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

    def step(state: TrainState, batch: Batch, kernel: Any, frozen: Any = None) -> tuple[TrainState, dict[str, Array]]:
        frozen = {} if frozen is None else frozen
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        counts = objective.counts(batch, kernel)
        sums = None
        if objective.needs_values:
            sums = over_micro_batches(
                lambda part, key: objective.sums(*hidden_of(state.parameters, frozen, part, key), part, kernel),
                batch,
                key,
            )
        coefficients = objective.coefficients(counts, sums)

        def gradient_of(part: Batch, key: Array) -> tuple[Sums, Any]:
            def total_of(parameters: Any) -> tuple[Array, Sums]:
                return objective.total(*hidden_of(parameters, frozen, part, key), part, kernel, coefficients)

            (_, sums), gradient = jax.value_and_grad(total_of, has_aux=True)(state.parameters)
            return sums, _wide(gradient)

        sums, gradient = over_micro_batches(gradient_of, batch, key)
        metrics = objective.metrics(sums, counts, coefficients)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        is_finite = state.is_finite & jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        metrics["is_finite"] = is_finite

        wide = _wide(state.parameters)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, wide)
        parameters = jax.tree.map(
            lambda new, old: new.astype(old.dtype), optax.apply_updates(wide, updates), state.parameters
        )
        updated = TrainState(parameters, optimizer_state, state.step + 1, state.is_finite)
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
