"""Optimizers and learning-rate schedules by name; everything in them is optax."""

from collections.abc import Callable

import jax
import optax
import optax.contrib

Schedule = Callable[[int], float]


def _matrices(parameters):
    """Weight decay shrinks matrices only: norms, biases and gates are no weights of a sum."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _rank(path, leaf) >= 2, parameters)


def _rank(path, leaf) -> int:
    """Count the axes of a parameter without the axis of stacked layers, whose path has no number: layers/mlp/..."""
    keys = [str(getattr(key, "key", "")) for key in path]
    is_stacked = "layers" in keys[:-1] and not keys[keys.index("layers") + 1].isdecimal()
    return leaf.ndim - is_stacked


def _adamw(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_matrices)


def _adafactor(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformation:
    # optax decays by the rate itself here, not by the rate times the learning rate as AdamW does.
    return optax.chain(
        optax.adafactor(learning_rate, multiply_by_parameter_scale=False),
        _decay_by_schedule(learning_rate, weight_decay),
    )


def _lion(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.lion(learning_rate, weight_decay=weight_decay, mask=_matrices)


def _sgd(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(weight_decay, _matrices), optax.sgd(learning_rate))


def _muon(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, AdamW for embedding, head and vectors, at one learning rate."""
    matrices = optax.chain(
        # Named, since optax 0.2.8 cannot find the matrices by itself inside a partition.
        optax.contrib.scale_by_muon(weight_dimension_numbers=_all_matrices),
        optax.stateless(_scale_to_adam),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.partition({"layer": matrices, "other": _adamw(learning_rate, weight_decay)}, _layer_matrices)


def _scale_to_adam(updates, parameters):
    """Give orthogonal updates the size of Adam's, 0.2 an entry: Liu et al., Muon is Scalable, 2025, equation 4."""
    return jax.tree.map(lambda update: update * (0.2 * max(update.shape[-2:]) ** 0.5), updates)


def _all_matrices(parameters):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), parameters)


def _layer_matrices(parameters):
    def label(path, leaf):
        in_layer = any(getattr(key, "key", None) == "layers" for key in path)
        return "layer" if in_layer and _rank(path, leaf) == 2 else "other"

    return jax.tree_util.tree_map_with_path(label, parameters)


def _decay_by_schedule(learning_rate: Schedule, weight_decay: float) -> optax.GradientTransformation:
    """update - learning_rate * weight_decay * parameter, after another transformation."""
    scaled = optax.chain(
        optax.add_decayed_weights(weight_decay, _matrices), optax.scale_by_learning_rate(learning_rate)
    )

    def init(parameters):
        return scaled.init(parameters)

    def update(updates, state, parameters):
        zeros = jax.tree.map(lambda leaf: leaf * 0, updates)
        decay, state = scaled.update(zeros, state, parameters)
        return optax.apply_updates(updates, decay), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Callable[[Schedule, float], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "lion": _lion,
    "muon": _muon,
    "sgd": _sgd,
}


def _cosine(peak: float, steps: int) -> Schedule:
    return optax.cosine_decay_schedule(peak, max(steps, 1))


def _linear(peak: float, steps: int) -> Schedule:
    return optax.linear_schedule(peak, 0.0, max(steps, 1))


def _constant(peak: float, steps: int) -> Schedule:
    return optax.constant_schedule(peak)


SCHEDULES: dict[str, Callable[[float, int], Schedule]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
}


def make_schedule(name: str, *, learning_rate: float, warmup_steps: int, steps: int) -> Schedule:
    """Make the learning rate as a function of the update's number, from 0.

        rate(n) = learning_rate (n + 1) / warmup_steps for n < warmup_steps, then the named shape over the rest

    Args:
      name: a name in `SCHEDULES`; cosine and linear end at 0.
      learning_rate: the largest rate.
      warmup_steps: updates of linear growth; the first update already has a positive rate.
      steps: all updates, warm-up included.

    Example:
      >>> schedule = make_schedule("constant", learning_rate=0.1, warmup_steps=2, steps=10)
      >>> [round(float(schedule(n)), 3) for n in (0, 1, 2, 9)]
      [0.05, 0.1, 0.1, 0.1]
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}.")
    after = SCHEDULES[name](learning_rate, steps - warmup_steps)
    if warmup_steps == 0:
        return after
    warmup = optax.linear_schedule(learning_rate / warmup_steps, learning_rate, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, after], [warmup_steps])


def make_optimizer(
    name: str, schedule: Schedule, *, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Make the update rule: clipping by the global norm (0: none), then the named optimizer.

    Args:
      name: a name in `OPTIMIZERS`.
      schedule: learning rate by update number.
      weight_decay: decoupled decay (for sgd: added to the gradient) of parameters with two or more axes.
      clip_norm: largest global norm of the gradient.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}.")
    rule = OPTIMIZERS[name](schedule, weight_decay)
    return optax.chain(optax.clip_by_global_norm(clip_norm), rule) if clip_norm > 0 else rule
