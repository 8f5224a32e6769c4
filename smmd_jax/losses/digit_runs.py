"""Numbers inside a sequence: maximal runs of digit targets, the place of each digit, and sums over runs and samples."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.operands import Vocabulary, as_integers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DigitRuns:
    """Where the numbers of one sequence of T positions are; a number is a maximal run of digit targets.

    Attributes:
      is_digit: [T] bool.
      is_first: [T] bool, true at the most significant digit of each run.
      run: [T] index of the run, T where the position is no digit.
      place: [T] power of ten of the digit, 0 at the run's last; 0 where the position is no digit.
      sample: [T] index of the packed sample that the position belongs to.
      samples: [] how many samples the sequence holds; 1 without segment ids.
    """

    is_digit: Bool[Array, "T"]
    is_first: Bool[Array, "T"]
    run: Int[Array, "T"]
    place: Int[Array, "T"]
    sample: Int[Array, "T"]
    samples: Int[Array, ""]

    def sum_over_run(self, values: Array) -> Array:
        """[T] values summed over each run; the sum stands at every digit of the run."""
        length = self.run.shape[0]
        totals = jax.ops.segment_sum(jnp.where(self.is_digit, values, 0), self.run, num_segments=length + 1)
        return totals[self.run]

    def largest_place(self, where: Bool[Array, "T"]) -> Int[Array, "T"]:
        """[T] the largest place of the run's digits that satisfy a condition; 0 if none does."""
        length = self.run.shape[0]
        places = jnp.where(where & self.is_digit, self.place, 0)
        return jnp.maximum(jax.ops.segment_max(places, self.run, num_segments=length + 1), 0)[self.run]

    def mean_over_samples(self, values: Float[Array, "T"], where: Bool[Array, "T"]) -> Float[Array, ""]:
        """The mean over samples of their means over the positions that satisfy a condition; 0 for one without any."""
        length = self.sample.shape[0]
        count = jax.ops.segment_sum(where.astype(jnp.float32), self.sample, num_segments=length)
        share = 1.0 / jnp.maximum(count, 1.0)[self.sample]
        return jnp.sum(jnp.where(where, values * share, 0.0)) / jnp.maximum(self.samples, 1).astype(jnp.float32)


def find_digit_runs(is_digit: Bool[Array, "T"], segment_ids: Int[Array, "T"] | None) -> DigitRuns:
    """Find the runs; a change of segment ends a run, and segment 0 is padding that belongs to no sample."""
    length = is_digit.shape[0]
    position = jnp.arange(length)
    if segment_ids is None:
        segment_ids = jnp.ones(length, jnp.int32)
        samples = jnp.int32(1)
    else:
        is_digit = is_digit & (segment_ids != 0)
        previous = jnp.concatenate([jnp.zeros(1, segment_ids.dtype), segment_ids[:-1]])
        samples = jnp.sum((segment_ids != 0) & (segment_ids != previous), dtype=jnp.int32)
    changes = segment_ids[1:] != segment_ids[:-1]
    false = jnp.zeros(1, bool)
    follows = jnp.concatenate([false, is_digit[:-1] & is_digit[1:] & ~changes])
    is_first = is_digit & ~follows
    run = jnp.where(is_digit, jnp.cumsum(is_first) - 1, length)
    is_last = is_digit & ~jnp.concatenate([follows[1:], false])
    last = lax.cummin(jnp.where(is_last, position, length), reverse=True)
    sample = jnp.cumsum(jnp.concatenate([false, changes]))
    return DigitRuns(
        is_digit=is_digit,
        is_first=is_first,
        run=run,
        place=jnp.where(is_digit, last - position, 0),
        sample=sample,
        samples=samples,
    )


def check_digits(name: str, kernel: Vocabulary) -> None:
    """Place values only make sense for single digits."""
    count, report = kernel.token_ids.shape[0], kernel.vocab.report
    digits = (report.smallest_value, report.largest_value, report.distinct_values) == (0, 9, 10)
    if count != 10 or not digits:
        raise ValueError(
            f"{name}: reads numbers digit by digit and needs the ten digits, got N = {count} numeric tokens "
            f"from {report.smallest_value:g} to {report.largest_value:g}; "
            "make the vocabulary with policy='digits'."
        )


def check_segment_ids(name: str, targets: Array, segment_ids: Array | None) -> Array | None:
    if segment_ids is None:
        return None
    if not isinstance(segment_ids, jax.Array):
        segment_ids = as_integers(f"{name}: segment_ids", segment_ids)
        if segment_ids.dtype.kind in "iu" and segment_ids.dtype.itemsize == 8:
            segment_ids = _renumbered(segment_ids)
    segment_ids = jnp.asarray(segment_ids)
    if segment_ids.shape != targets.shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"{name}: segment_ids must be integers of shape {targets.shape} like the targets, "
            f"got {segment_ids.dtype} of shape {segment_ids.shape}."
        )
    return segment_ids


def _renumbered(segment_ids: np.ndarray) -> np.ndarray:
    """The same segments in int32: cut to 32 bits, two ids could become one, or 0, which is padding."""
    _, index = np.unique(segment_ids, return_inverse=True)
    return np.where(segment_ids == 0, 0, index.reshape(segment_ids.shape) + 1).astype(np.int32)


def check_sequence(name: str, targets: Array) -> None:
    if targets.ndim == 0:
        raise ValueError(f"{name}: reads whole sequences: logits must be [..., T, V] and targets [..., T].")


def over_sequences(function, scores, match, segment_ids):
    """Map a function of one sequence over leading axes: (scores [T, ...], match [T, N], runs) -> tree of scalars."""

    def of_one(scores, match, segment_ids):
        return function(scores, match, find_digit_runs(match.any(-1), segment_ids))

    batch, length = match.shape[:-2], match.shape[-2]
    flat = lambda array: array.reshape(-1, *array.shape[len(batch) :])
    operands = (scores, match, segment_ids)
    if length == 0 or 0 in batch:
        one = jax.tree.map(lambda array: jnp.zeros((1, *array.shape[len(batch) + 1 :]), array.dtype), operands)
        return jax.tree.map(lambda leaf: jnp.zeros(batch, leaf.dtype), jax.eval_shape(of_one, *one))
    result = jax.vmap(of_one)(*jax.tree.map(flat, operands))
    return jax.tree.map(lambda leaf: leaf.reshape(batch), result)
