"""A loss of numeric columns at the rows with a numeric target alone, from hidden states: work follows their number."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.operands import Vocabulary, live_rows, match_targets, summed_like, zeros_varying_like

# About 15 % of the positions of a text are numbers: one round of 3/16 is nearly always enough.
_PARTS, _PARTS_A_ROUND = 16, 3
# With fewer numeric tokens the products with their columns cost less than the search for the rows.
_FEWEST_TOKENS = 256
_FEWEST_ROWS = 64


def is_worth_compacting(batch: tuple[int, ...], kernel: Vocabulary) -> bool:
    """Whether the rows are so many and the numeric tokens so many that skipping other rows pays."""
    return kernel.token_ids.shape[0] >= _FEWEST_TOKENS and bool(batch) and batch[-1] >= _FEWEST_ROWS


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def losses_at_numbers(
    loss_of_columns: Callable[..., Array],
    hidden: Float[Array, "*batch T D"],
    columns: Float[Array, "D N"],
    targets: Int[Array, "*batch T"],
    kernel: Vocabulary,
    mask: Bool[Array, "*batch T"],
) -> Float[Array, "*batch T"]:
    """Compute a loss at each numeric target from hidden states and the numeric columns of the head; 0 elsewhere.

        loss_i = loss_of_columns(hidden_i @ columns, match_i, kernel)

    Of each sequence the numeric rows are taken 3/16 of T at a time, for as many rounds as the fullest one needs. Rows
    are taken along T only, so sequences that lie on different devices stay there. The products are in the dtype of
    hidden, their sums in float32. Reverse mode only, once; the backward pass computes the scores of a round again.

    Args:
      loss_of_columns: `LossSpec.columns` of a loss that needs positions.
      hidden: [..., T, D].
      columns: [D, N] the head's columns of `kernel.token_ids`, in that order.
      targets, mask: [..., T].
      kernel: a NumericKernel or NumericVocab; its gradient is 0.

    Returns:
      [..., T] float32.
    """
    rounds = _Rounds(targets, kernel, mask)

    def turn(state):
        number, values = state
        scores, match = rounds.scores(number, hidden, columns)
        found = loss_of_columns(scores, match, kernel)
        return number + 1, rounds.put(number, found, values)

    zeros = zeros_varying_like(targets.shape, *jax.tree.leaves((hidden, columns, targets, kernel, mask)))
    return lax.while_loop(lambda state: state[0] < rounds.count, turn, (rounds.zero, zeros))[1]


def _forward(loss_of_columns, hidden, columns, targets, kernel, mask):
    losses = losses_at_numbers(loss_of_columns, hidden, columns, targets, kernel, mask)
    return losses, (hidden, columns, targets, kernel, mask)


def _backward(loss_of_columns, operands, cotangent):
    hidden, columns, targets, kernel, mask = operands
    rounds = _Rounds(targets, kernel, mask)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def turn(state):
        number, by_hidden, by_columns = state
        scores, match = rounds.scores(number, hidden, columns)
        weights = rounds.take(number, cotangent)
        delta = jax.grad(lambda scores: jnp.sum(weights * loss_of_columns(scores, match, kernel)))(scores)
        # Rounded as the states are: a float32 delta would make float32 products.
        delta = delta.astype(hidden.dtype)
        of_rows = product("...rn,dn->...rd", delta, columns.astype(hidden.dtype)).astype(hidden.dtype)
        by_columns = by_columns + product("...rd,...rn->dn", rounds.states(number, hidden), delta)
        return number + 1, rounds.put(number, of_rows, by_hidden), by_columns

    leaves = jax.tree.leaves((hidden, columns, targets, kernel, mask, cotangent))
    start = (
        rounds.zero,
        zeros_varying_like(hidden.shape, *leaves).astype(hidden.dtype),
        zeros_varying_like(columns.shape, *leaves),
    )
    _, by_hidden, by_columns = lax.while_loop(lambda state: state[0] < rounds.count, turn, start)
    return by_hidden, summed_like(columns, by_columns), None, None, None


losses_at_numbers.defvjp(_forward, _backward)


def losses_and_gradients_at_numbers(
    loss_of_columns: Callable[..., Array],
    hidden: Float[Array, "*batch T D"],
    columns: Float[Array, "D N"],
    targets: Int[Array, "*batch T"],
    kernel: Vocabulary,
    mask: Bool[Array, "*batch T"],
    weights: Float[Array, "*batch T"],
) -> tuple[Float[Array, "*batch T"], Float[Array, "*batch T D"], Float[Array, "D N"]]:
    """Compute `losses_at_numbers` and the gradients of their weighted sum, by hidden and, in float32, by the columns.

    Inside `shard_map` the gradient by the columns is one of this shard's rows, not yet a sum over shards.
    """
    # Columns that are one and the same on all shards would get the sum over them.
    own = columns.astype(jnp.float32) + zeros_varying_like(columns.shape, hidden, targets, mask, weights)
    at_numbers = lambda hidden, own: losses_at_numbers(loss_of_columns, hidden, own, targets, kernel, mask)
    losses, pull = jax.vjp(at_numbers, hidden, own)
    return losses, *pull(weights)


class _Rounds:
    """The numeric rows of each sequence in order, a fixed number of them a round."""

    def __init__(self, targets, kernel, mask):
        length = targets.shape[-1]
        is_number = match_targets(targets, kernel.token_ids, mask).any(-1)
        self.size = _PARTS_A_ROUND * -(-length // _PARTS)
        places = jnp.sort(jnp.where(is_number, jnp.arange(length), length), axis=-1)
        padding = [(0, 0)] * (targets.ndim - 1) + [(0, -length % self.size)]
        self.places = jnp.pad(places, padding, constant_values=length)
        # The rank of each row among the numeric ones of its sequence; -1 for the others.
        self.ranks = jnp.where(is_number, jnp.cumsum(is_number, axis=-1) - 1, -1)
        self.count = -(-jnp.max(self.ranks + 1) // self.size)
        self.zero = self.count * 0
        self.targets, self.kernel, self.length = targets, kernel, length

    def _rows(self, number):
        return lax.dynamic_slice_in_dim(self.places, number * self.size, self.size, axis=-1)

    def take(self, number, array):
        """The rows of a round: [..., T, *width] -> [..., R, *width]; garbage where a sequence has no more."""
        rows = jnp.minimum(self._rows(number), self.length - 1)
        axis = self.targets.ndim - 1
        return jnp.take_along_axis(array, rows.reshape(rows.shape + (1,) * (array.ndim - rows.ndim)), axis=axis)

    def put(self, number, found, array):
        """The inverse of `take`: rows of this round get what was found, the others keep what they have."""
        places = self.ranks - number * self.size
        is_here = (self.ranks >= 0) & (places >= 0) & (places < self.size)
        width = (1,) * (array.ndim - places.ndim)
        places = jnp.clip(places, 0, self.size - 1).reshape(places.shape + width)
        found = jnp.take_along_axis(found, places, axis=self.targets.ndim - 1)
        return jnp.where(is_here.reshape(is_here.shape + width), found, array)

    def scores(self, number, hidden, columns):
        """Float32 scores [..., R, N] of the rows of a round, and which token each has as target."""
        match = match_targets(self.take(number, self.targets), self.kernel.token_ids, self._live(number))
        columns = columns.astype(hidden.dtype)
        scores = jnp.einsum(
            "...rd,dn->...rn", self.states(number, hidden), columns, preferred_element_type=jnp.float32
        )
        return scores, match

    def states(self, number, hidden):
        """The hidden states of a round, 0 where a sequence has no more: what stands there may be NaN."""
        return live_rows(self.take(number, hidden), self._live(number))

    def _live(self, number):
        return self._rows(number) < self.length
