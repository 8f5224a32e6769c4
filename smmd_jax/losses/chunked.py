"""Head, cross entropy and numeric loss together, a chunk of rows at a time: never the logits of all positions."""

import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.kernels import NumericKernel
from smmd_jax.losses.compacted import is_worth_compacting, losses_and_gradients_at_numbers, losses_at_numbers
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
    summed_like,
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
    find_loss(loss)
    spec, hidden, head, targets, mask = _checked(name, hidden, head, targets, kernel, loss, mask)
    rows = math.prod(targets.shape)
    live = jnp.ones(targets.shape, bool) if mask is None else mask
    hidden = live_rows(hidden, live)
    columns = head[:, kernel.token_ids]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def losses_of_chunk(operands):
        hidden, targets, live = operands
        logits = _logits(hidden, head)
        # Dead rows of hidden are zeros: a mask over the chunk's logits would be one more pass over them on either way.
        ce = jnp.where(live, cross_entropy_loss(logits, jnp.where(live, targets, 0)), 0.0)
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
    find_loss(loss)
    _, hidden, head, targets, _ = _checked(name, hidden, head, targets, kernel, loss, None)
    weights = _checked_weights(name, targets, ce_weights, numeric_weights)
    chunk = _chunk_size(name, chunk, math.prod(targets.shape), head.shape[1])
    return _loss_sums(find_loss(loss), chunk, hidden, head, targets, kernel, weights)


def chunked_loss_and_gradients(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    loss: LossSpec | None,
    ce_weights: Float[Array, "*batch"],
    numeric_weights: Float[Array, "*batch"],
    mask: Bool[Array, "*batch"],
    gradients: str = "both",
    chunk: int | None = None,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array] | None]:
    """Compute a weighted sum of losses, the losses at each position, and the sum's gradients, in one scan of chunks.

        total = sum_i ce_weights_i ce_i + numeric_weights_i numeric_i

    What `chunked_loss_sums` is made of, for a caller that adds gradients up itself, as a training step does whose rows
    lie on several devices: the gradients are numbers here, not rules, and belong to `total` alone, so one product with
    the head serves both losses where both read the whole vocabulary.

    Args:
      hidden, head, targets, kernel, chunk: as `chunked_loss_sums`; the head is cast to the dtype of hidden.
      loss: a row of `LOSSES` that needs positions; None: cross entropy alone, and numeric is 0.
      ce_weights, numeric_weights: [...] float32.
      mask: [...] where the losses are computed; weights elsewhere must be 0.
      gradients: "both", "hidden" (a head that is not trained) or "none".

    Returns:
      (total, ce [...], numeric [...]), float32, and (by hidden [..., D] in its dtype, by head [D, V] float32 or None),
      or None in the place of the pair.

    Raises:
      ValueError, TypeError: as `chunked_loss_sums`.

    Example:
      >>> from smmd_jax import LOSSES, make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
      >>> (total, ce, _), (by_hidden, by_head) = chunked_loss_and_gradients(
      ...     jnp.ones((6, 4)), jnp.zeros((4, 32)), jnp.full(6, 3), kernel, loss=LOSSES["smmd"],
      ...     ce_weights=jnp.full(6, 1 / 6), numeric_weights=jnp.zeros(6), mask=jnp.ones(6, bool), chunk=4)
      >>> round(float(total), 4), ce.shape, by_head.shape
      (3.4657, (6,), (4, 32))
    """
    name = "chunked_loss_and_gradients"
    _, hidden, head, targets, mask = _checked(name, hidden, head, targets, kernel, loss, mask)
    weights = _checked_weights(name, targets, ce_weights, numeric_weights)
    rows = math.prod(targets.shape)
    chunk = _chunk_size(name, chunk, rows, head.shape[1])
    head = head.astype(hidden.dtype)
    together = {"both": _Gradients.TOGETHER, "hidden": _Gradients.HIDDEN, "none": _Gradients.NONE}[gradients]
    if loss is not None and loss.columns is not None and is_worth_compacting(targets.shape, kernel):
        return _with_numbers_apart(loss, chunk, hidden, head, targets, kernel, weights, mask, together)
    (ce_sum, numeric_sum), values, found = _scan_chunks(
        loss, chunk, hidden, head, targets, kernel, weights, (mask, mask), together
    )
    losses = (ce_sum + numeric_sum, *values)
    if found is None:
        return losses, None
    (by_hidden,), by_head = found
    if not by_head:
        return losses, (by_hidden, None)
    if len(by_head) == 1:
        return losses, (by_hidden, by_head[0])
    return losses, (by_hidden, by_head[0].at[:, kernel.token_ids].add(by_head[1], unique_indices=True))


def _with_numbers_apart(loss, chunk, hidden, head, targets, kernel, weights, mask, gradients):
    """Cross entropy in chunks; the numeric loss at the numeric rows, which are few, after them."""
    (ce_sum, _), (ce, _), found = _scan_chunks(
        None, chunk, hidden, head, targets, kernel, weights, (mask, mask), gradients
    )
    operands = (loss.columns, hidden, head[:, kernel.token_ids], targets, kernel, mask)
    if found is None:
        numeric = losses_at_numbers(*operands)
        return (ce_sum + jnp.sum(weights[1] * numeric), ce, numeric), None
    numeric, by_hidden, by_columns = losses_and_gradients_at_numbers(*operands, weights[1])
    (of_ce,), by_head = found
    by_hidden = (of_ce.astype(jnp.float32) + by_hidden.astype(jnp.float32)).astype(hidden.dtype)
    by_head = by_head[0].at[:, kernel.token_ids].add(by_columns, unique_indices=True) if by_head else None
    return (ce_sum + jnp.sum(weights[1] * numeric), ce, numeric), (by_hidden, by_head)


class _Gradients(enum.Enum):
    """Which gradients a scan makes: none, of the total by hidden, by both, or of each sum by both."""

    NONE = 0
    HIDDEN = 1
    TOGETHER = 2
    APART = 3


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_sums(spec, chunk, hidden, head, targets, kernel, weights):
    return _scan_apart(spec, chunk, hidden, head, targets, kernel, weights, _Gradients.NONE)[0]


def _loss_sums_forward(spec, chunk, hidden, head, targets, kernel, weights):
    sums, _, gradients = _scan_apart(spec, chunk, hidden, head, targets, kernel, weights, _Gradients.APART)
    return sums, (gradients, hidden, head, kernel)


def _loss_sums_backward(spec, chunk, residuals, cotangents):
    ((hidden_of_ce, hidden_of_numeric), (head_of_ce, head_of_numeric)), hidden, head, kernel = residuals
    of_ce, of_numeric = cotangents
    by_hidden = of_ce * hidden_of_ce + of_numeric * hidden_of_numeric
    by_head = of_ce * head_of_ce
    if spec.columns is None:
        by_head = by_head + of_numeric * head_of_numeric
    else:
        by_head = by_head.at[:, kernel.token_ids].add(of_numeric * head_of_numeric, unique_indices=True)
    return summed_like(hidden, by_hidden), summed_like(head, by_head), None, None, None


_loss_sums.defvjp(_loss_sums_forward, _loss_sums_backward)


def _scan_apart(spec, chunk, hidden, head, targets, kernel, weights, gradients):
    masks = tuple(weight != 0 for weight in weights)
    return _scan_chunks(spec, chunk, hidden, head, targets, kernel, weights, masks, gradients)


def _scan_chunks(spec, chunk, hidden, head, targets, kernel, weights, masks, gradients: _Gradients):
    """Both weighted sums, both losses at each position, and the gradients by hidden and by the head.

    A gradient by the head is one by its numeric columns where the numeric loss reads no others.
    """
    rows, depth = math.prod(targets.shape), hidden.shape[-1]
    operands = _in_chunks((live_rows(hidden, masks[0] | masks[1]), targets, *weights, *masks), rows, chunk)
    on_columns = spec is not None and spec.columns is not None
    columns = head[:, kernel.token_ids] if on_columns else head

    def of_chunk(carry, operands):
        hidden, targets, ce_weights, numeric_weights, ce_mask, numeric_mask = operands
        logits = _logits(hidden, head)
        scores = _logits(hidden, columns) if on_columns else logits

        def ce_sum(logits):
            # As above: dead rows of hidden are zeros, and a mask over the logits would take passes of its own.
            values = jnp.where(ce_mask, cross_entropy_loss(logits, jnp.where(ce_mask, targets, 0)), 0.0)
            return jnp.sum(ce_weights * values), values

        def numeric_sum(scores):
            if spec is None:
                return jnp.sum(numeric_weights * 0), numeric_weights * 0
            values = _numeric_loss(spec, scores, scores, targets, kernel, numeric_mask)
            return jnp.sum(numeric_weights * values), values

        def evaluate(sum_of, scores):
            if gradients == _Gradients.NONE:
                return sum_of(scores), None
            return jax.value_and_grad(sum_of, has_aux=True)(scores)

        (ce, ce_values), by_logits = evaluate(ce_sum, logits)
        (numeric, numeric_values), by_scores = evaluate(numeric_sum, scores)
        (sums, by_head), by_hidden = carry, ()
        if gradients != _Gradients.NONE:
            pairs = [(by_logits, head)]
            if spec is not None:
                is_one = gradients != _Gradients.APART and not on_columns
                pairs = [(by_logits + by_scores, head)] if is_one else [*pairs, (by_scores, columns)]
            # Operands in the model's own precision, sums in float32: a float32 delta would make float32 products.
            deltas = [(delta.astype(hidden.dtype), matrix) for delta, matrix in pairs]
            product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
            by_hidden = [product("rv,dv->rd", *delta) for delta in deltas]
            by_hidden = by_hidden if gradients == _Gradients.APART else [sum(by_hidden)]
            by_hidden = tuple(part.astype(hidden.dtype) for part in by_hidden)
            if by_head:
                parts = zip(by_head, deltas, strict=True)
                by_head = tuple(total + product("rd,rv->dv", hidden, delta) for total, (delta, _) in parts)
        return ((sums[0] + ce, sums[1] + numeric), by_head), ((ce_values, numeric_values), by_hidden)

    zeros = lambda *shape: zeros_varying_like(shape, *jax.tree.leaves((operands, head, kernel)))
    widths = []
    if gradients in (_Gradients.TOGETHER, _Gradients.APART):
        is_two = spec is not None and (on_columns or gradients == _Gradients.APART)
        widths = [head.shape[1], columns.shape[1]] if is_two else [head.shape[1]]
    carry = ((zeros(), zeros()), tuple(zeros(depth, width) for width in widths))
    (sums, by_head), (values, by_hidden) = lax.scan(of_chunk, carry, operands)
    values = tuple(part.reshape(-1)[:rows].reshape(targets.shape) for part in values)
    if gradients == _Gradients.NONE:
        return sums, values, None
    return sums, values, (tuple(part.reshape(-1, depth)[:rows].reshape(hidden.shape) for part in by_hidden), by_head)


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


def _checked_weights(name, targets, ce_weights, numeric_weights):
    checked = []
    for what, weights in (("ce_weights", ce_weights), ("numeric_weights", numeric_weights)):
        weights = as_array(f"{name}: {what}", weights)
        check_real(f"{name}: {what}", weights)
        if weights.shape != targets.shape:
            raise ValueError(f"{name}: {what} have shape {weights.shape}, targets {targets.shape}; they must agree.")
        checked.append(weights.astype(jnp.float32))
    return tuple(checked)


def _checked(name, hidden, head, targets, kernel, loss, mask):
    spec = find_loss(loss) if isinstance(loss, str) else loss
    if spec is not None and spec.needs != "position":
        what = repr(loss) if isinstance(loss, str) else spec.function.__name__
        raise ValueError(f"{name}: loss {what} reads whole sequences and cannot be cut into chunks of positions.")
    if spec is not None and spec.terms is not None:
        check_vocabulary(name, kernel, NumericKernel)
    check_vocabulary(name, kernel)
    hidden, targets, mask = check_operands(name, hidden, targets, mask, what="hidden", last="D")
    return spec, hidden, check_head(name, hidden, head, kernel), targets, mask
