"""Head, cross entropy and numeric loss together, a chunk of rows at a time: never the logits of all positions."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.kernels import NumericKernel
from smmd_jax.losses.cross_entropy import cross_entropy_loss
from smmd_jax.losses.table import LossSpec, find_loss
from smmd_jax.operands import (
    Vocabulary,
    as_array,
    check_head,
    check_operands,
    check_real,
    check_vocabulary,
    live_rows,
    match_targets,
    zeros_varying_like,
)
from smmd_jax.scalars import as_integer

# 2^25 float32 logits are 128 MiB; a chunk below 128 rows would leave the matrix units idle.
_LOGITS_PER_CHUNK = 2**25
_SMALLEST_CHUNK = 128


def chunked_cross_entropy_and_numeric(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    loss: str = "smmd",
    mask: Bool[Array, "*batch"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Compute cross entropy and a numeric loss at each position from hidden states, in chunks.

        ce = cross_entropy_loss(hidden @ head, targets)
        numeric = LOSSES[loss].function(hidden @ head, targets, kernel)

    The logits of one chunk live at a time; the backward pass makes them again. With bfloat16 operands the products
    accumulate in float32. Use `chunked_loss_sums` where the weights of the positions are known: it recomputes nothing.

    Args:
      hidden: [..., D] the states that the head multiplies.
      head: [D, V]; a Hugging Face `lm_head.weight` is [V, D], pass its transpose.
      targets: [...] token ids.
      kernel: a `NumericKernel`, or a `NumericVocab` for a loss without a quadratic form.
      loss: a name in `LOSSES` that needs positions, not sequences.
      mask: [...] bool, true where the position counts; masked positions may hold anything.
      chunk: rows (positions) at a time; None takes as many as give 2^25 logits, at least 128.

    Returns:
      (ce [...], numeric [...]), float32.

    Raises:
      ValueError: an unknown loss, one that needs sequences, a chunk below 1, shapes that do not fit.
      TypeError: as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
      >>> ce, numeric = chunked_cross_entropy_and_numeric(
      ...     jnp.ones((6, 4)), jnp.zeros((4, 32)), jnp.array([3, 3, 3, 20, 20, 20]), kernel, chunk=2)
      >>> [round(float(value), 3) for value in numeric]
      [0.911, 0.911, 0.911, 0.0, 0.0, 0.0]

    References:
      Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024, arXiv 2411.09009 (the problem).
    """
    name = "chunked_cross_entropy_and_numeric"
    spec, hidden, head, targets, mask = _checked(name, hidden, head, targets, kernel, loss, mask)
    rows = math.prod(targets.shape)
    live = jnp.ones(targets.shape, bool) if mask is None else mask
    hidden = live_rows(hidden, live)
    columns = head[:, kernel.token_ids]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def losses_of_chunk(operands):
        hidden, targets, live = operands
        logits = _logits(hidden, head)
        ce = cross_entropy_loss(logits, targets, mask=live)
        return ce, _numeric_loss(spec, _logits(hidden, columns), logits, targets, kernel, live)

    operands = _in_chunks((hidden, targets, live), rows, _chunk_size(name, chunk, rows, head.shape[1]))
    parts = lax.map(losses_of_chunk, operands)
    return jax.tree.map(lambda part: part.reshape(-1)[:rows].reshape(targets.shape), parts)


def chunked_loss_sums(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    loss: str = "smmd",
    ce_weights: Float[Array, "*batch"],
    numeric_weights: Float[Array, "*batch"],
    chunk: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Compute weighted sums of cross entropy and of a numeric loss, with gradients made in the forward pass.

        ce_sum = sum_i ce_weights_i ce_i,   numeric_sum = sum_i numeric_weights_i numeric_i

    The logits of one chunk live at a time and are made once: their gradients are taken while they are there, so
    differentiating costs three products with the head, as with full logits, not four. Weights are constants; a position
    of weight 0 may hold anything. Products accumulate in float32, the gradient of the head over all chunks as well.
    Reverse mode only, once: there is no jvp and no second derivative (`chunked_cross_entropy_and_numeric` has both).

    Args:
      hidden, head, targets, kernel, loss, chunk: as `chunked_cross_entropy_and_numeric`.
      ce_weights: [...] float, the weight of each position's cross entropy, e.g. mask / count.
      numeric_weights: [...] float, the weight of each position's numeric loss.

    Returns:
      (ce_sum, numeric_sum), float32 scalars.

    Raises:
      ValueError, TypeError: as `chunked_cross_entropy_and_numeric`.

    Example:
      >>> from smmd_jax import make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
      >>> weights = jnp.full(6, 1 / 6)
      >>> sums = chunked_loss_sums(jnp.ones((6, 4)), jnp.zeros((4, 32)), jnp.full(6, 3), kernel,
      ...                          ce_weights=weights, numeric_weights=weights, chunk=4)
      >>> [round(float(value), 4) for value in sums]      # log 32, and SMMD of the uniform distribution
      [3.4657, 0.9107]

    References: as `chunked_cross_entropy_and_numeric`.
    """
    name = "chunked_loss_sums"
    _, hidden, head, targets, _ = _checked(name, hidden, head, targets, kernel, loss, None)
    ce_weights = as_array(f"{name}: ce_weights", ce_weights)
    numeric_weights = as_array(f"{name}: numeric_weights", numeric_weights)
    for what, weights in (("ce_weights", ce_weights), ("numeric_weights", numeric_weights)):
        check_real(f"{name}: {what}", weights)
        if weights.shape != targets.shape:
            raise ValueError(f"{name}: {what} have shape {weights.shape}, targets {targets.shape}; they must agree.")
    rows = math.prod(targets.shape)
    chunk = _chunk_size(name, chunk, rows, head.shape[1])
    weights = (ce_weights.astype(jnp.float32), numeric_weights.astype(jnp.float32))
    return _loss_sums(loss, chunk, hidden, head, targets, kernel, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_sums(loss, chunk, hidden, head, targets, kernel, weights):
    return _scan_chunks(loss, chunk, hidden, head, targets, kernel, weights, with_gradients=False)[0]


def _loss_sums_forward(loss, chunk, hidden, head, targets, kernel, weights):
    sums, gradients = _scan_chunks(loss, chunk, hidden, head, targets, kernel, weights, with_gradients=True)
    return sums, (gradients, hidden, head, kernel)


def _loss_sums_backward(loss, chunk, residuals, cotangents):
    gradients, hidden, head, kernel = residuals
    of_ce, of_numeric = cotangents
    hidden_of_ce, hidden_of_numeric, head_of_ce, head_of_numeric = gradients
    by_hidden = of_ce * hidden_of_ce + of_numeric * hidden_of_numeric
    by_head = of_ce * head_of_ce
    if find_loss(loss).columns is None:
        by_head = by_head + of_numeric * head_of_numeric
    else:
        by_head = by_head.at[:, kernel.token_ids].add(of_numeric * head_of_numeric, unique_indices=True)
    return _summed_like(hidden, by_hidden), _summed_like(head, by_head), None, None, None


def _summed_like(operand, cotangent):
    """Sum a cotangent over the mesh axes of `shard_map` over which its operand is one and the same; round it last."""
    _, sum_over_axes = jax.vjp(lambda operand: operand.astype(jnp.float32) + cotangent, operand)
    return sum_over_axes(cotangent)[0]


_loss_sums.defvjp(_loss_sums_forward, _loss_sums_backward)


def _scan_chunks(loss, chunk, hidden, head, targets, kernel, weights, *, with_gradients: bool):
    """Both sums; and for each the gradient by hidden and by the head (by its numeric columns where those suffice)."""
    spec, rows, depth = find_loss(loss), math.prod(targets.shape), hidden.shape[-1]
    ce_weights, numeric_weights = weights
    hidden_of_all = live_rows(hidden, (ce_weights != 0) | (numeric_weights != 0))
    columns = head[:, kernel.token_ids]
    operands = _in_chunks((hidden_of_all, targets, ce_weights, numeric_weights), rows, chunk)

    def of_chunk(carry, operands):
        hidden, targets, ce_weights, numeric_weights = operands
        logits = _logits(hidden, head)

        def ce_sum(logits):
            return jnp.sum(ce_weights * cross_entropy_loss(logits, targets, mask=ce_weights != 0))

        def numeric_sum(scores):
            values = _numeric_loss(spec, scores, scores, targets, kernel, numeric_weights != 0)
            return jnp.sum(numeric_weights * values)

        scores, weight_of_scores = (logits, head) if spec.columns is None else (_logits(hidden, columns), columns)
        if not with_gradients:
            sums, _ = carry
            return ((sums[0] + ce_sum(logits), sums[1] + numeric_sum(scores)), ()), ()
        ce, by_logits = jax.value_and_grad(ce_sum)(logits)
        numeric, by_scores = jax.value_and_grad(numeric_sum)(scores)
        by_hidden, (sums, by_head) = [], carry
        head_gradients = []
        for delta, matrix, total in ((by_logits, head, by_head[0]), (by_scores, weight_of_scores, by_head[1])):
            # Operands in the model's own precision, sums in float32: a float32 delta would make float32 products.
            delta = delta.astype(hidden.dtype)
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            by_hidden.append(product("rv,dv->rd", delta, matrix).astype(hidden.dtype))
            head_gradients.append(total + product("rd,rv->dv", hidden, delta))
        return ((sums[0] + ce, sums[1] + numeric), tuple(head_gradients)), tuple(by_hidden)

    zeros = lambda *shape: zeros_varying_like(shape, *jax.tree.leaves((operands, head, kernel)))
    by_head = ()
    if with_gradients:
        widths = (head.shape[1], head.shape[1] if spec.columns is None else columns.shape[1])
        by_head = tuple(zeros(depth, width) for width in widths)
    (sums, by_head), by_hidden = lax.scan(of_chunk, ((zeros(), zeros()), by_head), operands)
    by_hidden = tuple(part.reshape(-1, depth)[:rows].reshape(hidden.shape) for part in by_hidden)
    return sums, by_hidden + by_head


def _numeric_loss(spec: LossSpec, scores, logits, targets, kernel, live):
    """The numeric loss of one chunk: from its numeric columns where they suffice."""
    if spec.columns is None:
        return spec.function(logits, targets, kernel, mask=live)
    match = match_targets(targets, kernel.token_ids, live)
    return spec.columns(live_rows(scores, match.any(-1)), match, kernel)


def _logits(hidden, matrix):
    return jnp.einsum("rd,dv->rv", hidden, matrix, preferred_element_type=jnp.float32)


def _in_chunks(arrays: Any, rows: int, chunk: int):
    """Flatten the leading axes to rows, pad with zeros (weight 0, mask false) and cut into chunks."""
    count = -(-rows // chunk)

    def cut(array):
        kept = array.shape[-1:] if array.ndim > batch_rank else ()
        flat = array.reshape(rows, *kept)
        padding = [(0, count * chunk - rows)] + [(0, 0)] * len(kept)
        return jnp.pad(flat, padding).reshape(count, chunk, *kept)

    batch_rank = arrays[1].ndim
    return jax.tree.map(cut, arrays)


def _chunk_size(name: str, chunk: int | None, rows: int, width: int) -> int:
    if chunk is None:
        fitting = 2 ** int(math.log2(max(_LOGITS_PER_CHUNK // max(width, 1), 1)))
        chunk = max(_SMALLEST_CHUNK, fitting)
    else:
        given, chunk = chunk, as_integer(chunk)
        if chunk is None or chunk < 1:
            raise ValueError(f"{name}: chunk must be a positive number of rows or None, got {given!r}.")
    return max(1, min(chunk, rows))


def _checked(name, hidden, head, targets, kernel, loss, mask):
    spec = find_loss(loss)
    if spec.needs != "position":
        raise ValueError(f"{name}: loss {loss!r} reads whole sequences and cannot be cut into chunks of positions.")
    if spec.terms is not None:
        check_vocabulary(name, kernel, NumericKernel)
    check_vocabulary(name, kernel)
    hidden, targets, mask = check_operands(name, hidden, targets, mask, what="hidden", last="D")
    return spec, hidden, check_head(name, hidden, head, kernel), targets, mask

