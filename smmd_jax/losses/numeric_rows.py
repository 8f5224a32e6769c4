"""The quadratic form r^T M r where N is large: computed at the rows with a numeric target, and nowhere else."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.losses.quadratic import value_and_gradient
from smmd_jax.operands import live_rows, zeros_varying_like

# About 15 % of the positions of a text are numbers, so this capacity of 3/16 of the rows is seldom exceeded.
_PARTS, _PARTS_WITHIN_CAPACITY = 16, 3
# The rows beyond the capacity are worked through in sixteen blocks; below 32 rows a block would be overhead.
_SMALLEST_BLOCK = 32


class Scores(NamedTuple):
    """How the scores of rows come out of arrays, the first of which is [..., W] with the leading axes of the rows.

    Attributes:
      at: (arrays, rows [R]) -> [R, N], the scores of rows by their flat index; zeros for one out of range.
      moved_at: (arrays, tangents, rows [R]) -> [R, N], their tangents.
      moved_in: (arrays, tangents, blocks) -> [blocks, N, 1, ..., block, 1], the tangents of the scores of whole blocks.
    """

    at: Callable[..., Float[Array, "R N"]]
    moved_at: Callable[..., Float[Array, "R N"]]
    moved_in: Callable[..., Float[Array, "blocks N *window"]]


class Blocks(NamedTuple):
    """Rows in blocks: any rows, or neighbours along the last leading axis, which have a start.

    Attributes:
      rows: [blocks, block] flat index of each row, out of range if it does not count.
      targets: [blocks, block] index of the row's target among the N tokens, -1 if it does not count.
      starts: of each block the first row's index along each leading axis, out of range if none of its rows counts.
    """

    rows: Int[Array, "blocks block"]
    targets: Int[Array, "blocks block"]
    starts: tuple[Int[Array, "blocks"], ...]


def loss_of_numeric_rows(
    scores: Scores, arrays: Any, match: Bool[Array, "*batch N"], form: Float[Array, "N N"]
) -> Float[Array, "*batch"]:
    """The loss at the rows with a match; exactly 0, value and gradient, at the others.

    The first numeric rows are compacted to a fixed capacity, and for them alone a gradient is kept. Where more rows are
    numeric, the blocks that hold the others are computed too, and again in the backward pass: no row is ever dropped,
    and the work follows the count.
    """
    target = jnp.sum(jnp.where(match, jnp.arange(1, match.shape[-1] + 1), 0), axis=-1) - 1
    return _loss_of_targets(scores, arrays, target, form)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _loss_of_targets(scores, arrays, target, form):
    """The loss of the rows with a target >= 0, an index into the N tokens."""
    first, others = _cut(target)
    of = lambda part: lax.map(lambda block: _of_block(scores, arrays, form, *block)[0], part[:2])
    return _put(of(first), first.rows, target.shape) + _put(of(others), others.rows, target.shape)


@_loss_of_targets.defjvp
def _loss_of_targets_jvp(scores, primals, tangents):
    arrays, target, form = primals
    first, others = _cut(target)
    values, gradients = lax.map(lambda block: _of_block(scores, arrays, form, *block), first[:2])
    moved = scores.moved_at(arrays, tangents[0], first.rows.reshape(-1)).reshape(gradients.shape)
    tangents_of_first = jnp.sum(gradients * moved, axis=-1)

    # Recomputed in the backward pass: kept, the gradients of all blocks would be an array of all rows.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_block(rows, targets, moved):
        value, gradient = _of_block(scores, arrays, form, rows, targets)
        return value, jnp.sum(gradient.T * moved.reshape(-1, len(rows)), axis=0)

    # Outside the loop: the transpose of what takes [rows, V] in a loop makes a [rows, V] for each of its turns.
    moved = scores.moved_in(arrays, tangents[0], others)
    values_of_others, tangents_of_others = lax.map(lambda block: of_block(*block), (*others[:2], moved))
    put = lambda of_first, of_others: (
        _put(of_first, first.rows, target.shape) + _put(of_others, others.rows, target.shape)
    )
    return put(values, values_of_others), put(tangents_of_first, tangents_of_others)


def _of_block(scores, arrays, form, rows, targets):
    """Values and gradients of the rows of a block that count, zeros for the others; nothing to do if none does."""
    block, size = len(targets), len(form)

    def compute():
        live = targets >= 0
        numeric = live_rows(scores.at(arrays, rows), live).astype(jnp.float32)
        value, gradient = value_and_gradient(numeric, targets[:, None] == jnp.arange(size), form)
        return jnp.where(live, value, 0.0), live_rows(gradient, live)

    def skip():
        operands = jax.tree.leaves((arrays, form, targets))
        return zeros_varying_like((block,), *operands), zeros_varying_like((block, size), *operands)

    return lax.cond(jnp.any(targets >= 0), compute, skip)


def _cut(target: Int[Array, "*batch"]) -> tuple[Blocks, Blocks]:
    """The first numeric rows, compacted, and blocks of neighbours for the numeric rows beyond the capacity.

    Where blocks do not fill the last leading axis, the last one reaches back; no row counts twice.
    """
    *lead, length = target.shape
    total = target.size
    share = -(-total // _PARTS)
    flat = target.reshape(total)
    rows = jnp.nonzero(flat >= 0, size=_PARTS_WITHIN_CAPACITY * share, fill_value=total)[0]
    rows = rows.reshape(_PARTS_WITHIN_CAPACITY, share)
    compact = Blocks(rows=rows, targets=flat.at[rows].get(mode="fill", fill_value=-1), starts=())

    others = jnp.where(jnp.cumsum(flat >= 0) > rows.size, flat, -1)
    block = min(length, max(_SMALLEST_BLOCK, share))
    first = np.arange(0, length, block)
    starts = np.minimum(first, length - block)
    # Of each block: index along each leading axis, flat index, and the first flat index that no block before it holds.
    axes = [axis.ravel() for axis in np.meshgrid(*map(np.arange, lead), starts, indexing="ij")]
    start, own = (np.add.outer(np.arange(0, total, length), part).ravel() for part in (starts, first))
    # As many rows as the capacity come before any row beyond it.
    needed = start + block > rows.size
    index = start[needed, None] + jnp.arange(block)
    targets = jnp.where(index >= own[needed, None], others[index], -1)
    live = targets >= 0
    return compact, Blocks(
        rows=jnp.where(live, index, total),
        targets=targets,
        starts=tuple(
            jnp.where(live.any(-1), axis[needed], size) for axis, size in zip(axes, target.shape, strict=True)
        ),
    )


def _put(values: Array, rows: Array, batch: tuple[int, ...]) -> Float[Array, "*batch"]:
    flat = jnp.zeros(math.prod(batch), values.dtype)
    return flat.at[rows].set(values, mode="drop", unique_indices=True).reshape(batch)


def _rows_of(array: Float[Array, "*batch W"], rows: Int[Array, "*rows"]) -> tuple[Int[Array, "*rows"], ...]:
    """The index along each leading axis of rows given by their flat index: a reshaped copy of all logits is too large.

    A row out of range stays out of range.
    """
    batch = array.shape[:-1]
    first, *others = jnp.unravel_index(rows, batch)
    return jnp.where(rows < math.prod(batch), first, batch[0]), *others


def _columns_at(arrays, rows):
    source, columns = arrays
    return _take(source, _rows_of(source, rows), columns, 1).reshape(len(rows), len(columns))


def _columns_moved_at(arrays, tangents, rows):
    return _columns_at((tangents[0], arrays[1]), rows).astype(jnp.float32)


def _columns_moved_in(arrays, tangents, blocks):
    return _take(tangents[0], blocks.starts, arrays[1], blocks.rows.shape[-1]).astype(jnp.float32)


def _take(source, starts, columns, length):
    """[R, N, 1, ..., length, 1]: `length` rows of each column from each start on, zeros where they do not exist."""
    lead = source.ndim - 1
    index = jnp.stack(jnp.broadcast_arrays(*(axis[:, None] for axis in starts), columns), axis=-1)
    # No dimension is collapsed: for the transpose, XLA would copy the updates into a layout with those of length 1.
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, lead + 3)), collapsed_slice_dims=(), start_index_map=tuple(range(lead + 1))
    )
    sizes = (1,) * (lead - 1) + (length, 1)
    return lax.gather(source, index, numbers, sizes, mode="fill", fill_value=0)


def _products_at(arrays, rows):
    hidden, columns = arrays
    states = hidden.at[_rows_of(hidden, rows)].get(mode="fill", fill_value=0)
    return jnp.einsum("...d,dn->...n", states, columns, preferred_element_type=jnp.float32)


def _products_moved_at(arrays, tangents, rows):
    return jax.jvp(lambda *arrays: _products_at(arrays, rows), arrays, tangents)[1]


def _products_moved_in(arrays, tangents, blocks):
    def compute(arrays, tangents):
        return jnp.swapaxes(_products_moved_at(arrays, tangents, blocks.rows), -1, -2)

    def skip(arrays, tangents):
        shape = (len(blocks.rows), arrays[1].shape[-1], blocks.rows.shape[-1])
        return zeros_varying_like(shape, *arrays, *tangents, blocks.rows)

    return lax.cond(jnp.any(blocks.targets >= 0), compute, skip, arrays, tangents)


# source [..., V], columns [N]: the scores are source[..., columns].
COLUMNS = Scores(at=_columns_at, moved_at=_columns_moved_at, moved_in=_columns_moved_in)
# hidden [..., D], columns [D, N]: the scores are hidden @ columns.
PRODUCTS = Scores(at=_products_at, moved_at=_products_moved_at, moved_in=_products_moved_in)
