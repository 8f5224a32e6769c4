"""SMMD: one quadratic form of the residual p - q over the numeric tokens; its gradient needs no second product."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.kernels import NumericKernel
from smmd_jax.operands import (
    at_numeric,
    check_head,
    check_head_width,
    check_operands,
    check_vocabulary,
    live_rows,
    match_targets,
    numeric_columns,
)

# From this many numeric tokens on, the N x N product runs on the rows with a numeric target only.
_COMPACT_FROM_TOKENS = 256
_COMPACT_FROM_ROWS = 64
# About 15 % of the positions of a text are numbers: three of sixteen blocks. Blocks below 32 rows would be overhead.
_BLOCKS = 16
_SMALLEST_BLOCK = 32
# From hidden states the products run on a quarter of the rows; above that the dense form takes over.
_COMPACT_SHARE = 4


class SmmdTerms(NamedTuple):
    """The parts of the loss at each position, 0 where the target is not numeric.

    Attributes:
      mmd: [...] r^T K r.
      smoothness: [...] r^T (D - K) r, not weighed by alpha.
      total: [...] r^T M r, the loss.
      is_numeric: [...] bool.
    """

    mmd: Float[Array, "*batch"]
    smoothness: Float[Array, "*batch"]
    total: Float[Array, "*batch"]
    is_numeric: Bool[Array, "*batch"]


def smmd_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: NumericKernel,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the Smooth Maximum Mean Discrepancy loss at each position.

        loss = r^T M r,   r = softmax(logits[V_num]) - onehot(target),   M = K + alpha (D - K)

    Nothing is shifted or reduced: `targets[t]` is the token that `logits[t]` predicts (see `shift_targets`), and
    the paper's mean is `mean_from(*sum_and_count(loss, numeric_mask(targets, kernel)))`. The gradient with respect
    to the numeric logits is 2 p (u - <p, u>), u = M r; it is exactly 0 for all other logits, so add cross entropy.

    Args:
      logits: [..., V] of any floating dtype; the arithmetic is float32.
      targets: [...] token ids; one that is not numeric contributes exactly 0.
      kernel: a `NumericKernel`; pass it to a jitted function as an argument.
      mask: [...] bool, true where the position counts; masked positions may hold anything (NaN, label -100).

    Returns:
      [...] float32, at least 0 up to rounding.

    Raises:
      ValueError: shapes that do not fit; TokenRangeError, one of them, if a numeric id lies beyond V.
      TypeError: logits that are not floating point, targets that are not integers, a mask that is not boolean.

    Example:
      >>> from smmd_jax import make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
      >>> loss = smmd_loss(jnp.zeros((2, 10)), jnp.array([3, 0]), kernel)     # uniform prediction
      >>> [round(float(value), 5) for value in loss]
      [0.91072, 1.05887]

    References:
      Zuo, Yue, Zheng, Wang, Liu, "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026,
      arXiv 2606.27731.
    """
    check_vocabulary("smmd_loss", kernel, NumericKernel)
    logits, targets, mask = check_operands("smmd_loss", logits, targets, mask)
    if _is_large(targets.shape, kernel):
        # The columns of the numeric rows alone: taking them for all rows costs as much as cross entropy itself.
        check_head_width("smmd_loss", kernel, logits.shape[-1])
        return _loss_of_numeric_rows(logits, kernel.token_ids, match_targets(targets, kernel.token_ids, mask), kernel)
    return smmd_loss_from_numeric_logits(numeric_columns("smmd_loss", logits, kernel), targets, kernel, mask=mask)


def smmd_loss_from_hidden(
    hidden: Float[Array, "*batch D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "*batch"],
    kernel: NumericKernel,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the SMMD loss from hidden states with N columns of the head, so that no [..., V] array exists.

        loss = r^T M r,   r = softmax(hidden @ head[:, V_num]) - onehot(target)

    Args:
      hidden: [..., D] the states that the head multiplies (after the final norm).
      head: [D, V]; a Hugging Face `lm_head.weight` is [V, D], pass its transpose.
      targets, kernel, mask: as `smmd_loss`.

    Returns:
      [...] float32; equal to `smmd_loss(hidden @ head, ...)` up to rounding of the product.

    Raises:
      ValueError: a head that is not [D, V] (a [V, D] head is told to be transposed), and as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
      >>> hidden, head = jnp.ones((4, 16)), jnp.zeros((16, 50))
      >>> round(float(smmd_loss_from_hidden(hidden, head, jnp.full(4, 3), kernel)[0]), 5)
      0.91072

    References: as `smmd_loss`.
    """
    name = "smmd_loss_from_hidden"
    check_vocabulary(name, kernel, NumericKernel)
    hidden, targets, mask = check_operands(name, hidden, targets, mask, what="hidden", last="D")
    columns = check_head(name, hidden, head, kernel)[:, kernel.token_ids]
    match = match_targets(targets, kernel.token_ids, mask)

    def loss_of_rows(hidden, match):
        scores = jnp.einsum("...d,dn->...n", hidden, columns, preferred_element_type=jnp.float32)
        return at_numeric(quadratic_loss(scores, match, kernel.form), match)

    # NaN in a dead row would reach the head's gradient through the product.
    return _on_numeric_rows(loss_of_rows, live_rows(hidden, match.any(-1)), match)


def smmd_loss_from_numeric_logits(
    numeric_logits: Float[Array, "*batch N"],
    targets: Int[Array, "*batch"],
    kernel: NumericKernel,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the SMMD loss from the N numeric logits alone; the primitive under the other two forms.

        loss = r^T M r,   r = softmax(numeric_logits) - onehot(target)

    For heads with bias, soft-cap, LoRA, quantised or sharded columns: compute the N columns your way and pass them.

    Args:
      numeric_logits: [..., N] logits in the order of `kernel.token_ids`.
      targets: [...] token ids of the whole vocabulary, not indices into the N columns.
      kernel, mask: as `smmd_loss`.

    Returns:
      [...] float32.

    Raises:
      ValueError, TypeError: as `smmd_loss`; also if the last axis is not N.

    Example:
      >>> from smmd_jax import make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab({"0": 40, "1": 41}))
      >>> float(smmd_loss_from_numeric_logits(jnp.array([-100.0, 100.0]), jnp.array(41), kernel))
      0.0

    References: as `smmd_loss`.
    """
    name = "smmd_loss_from_numeric_logits"
    check_vocabulary(name, kernel, NumericKernel)
    scores, targets, mask = check_operands(name, numeric_logits, targets, mask, what="numeric_logits", last="N")
    if scores.shape[-1] != kernel.form.shape[-1]:
        raise ValueError(
            f"{name}: numeric_logits have {scores.shape[-1]} columns and the kernel has N = {kernel.form.shape[-1]}; "
            "pass the columns of kernel.token_ids, in that order."
        )
    match = match_targets(targets, kernel.token_ids, mask)
    if _is_large(targets.shape, kernel):
        return _loss_of_numeric_rows(scores, jnp.arange(scores.shape[-1]), match, kernel)
    return smmd_columns(live_rows(scores, match.any(-1)).astype(jnp.float32), match, kernel)


def smmd_columns(
    scores: Float[Array, "*batch N"], match: Bool[Array, "*batch N"], kernel: NumericKernel
) -> Float[Array, "*batch"]:
    """The loss of float32 numeric logits, for the table of losses."""
    return at_numeric(quadratic_loss(scores, match, kernel.form), match)


def smmd_terms(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: NumericKernel,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> SmmdTerms:
    """Compute the parts of the SMMD loss apart, for logs and ablations.

        mmd = r^T K r,   smoothness = r^T (D - K) r,   total = r^T M r

    Args, Raises: as `smmd_loss`.

    Returns:
      `SmmdTerms`; with terms="smmd", total = mmd + alpha * smoothness.

    Example:
      >>> from smmd_jax import make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
      >>> parts = smmd_terms(jnp.zeros(10), jnp.array(3), kernel)
      >>> round(float(parts.mmd), 5), round(float(parts.smoothness), 5)
      (0.45947, 3.81774)

    References: as `smmd_loss`.
    """
    check_vocabulary("smmd_terms", kernel, NumericKernel)
    logits, targets, mask = check_operands("smmd_terms", logits, targets, mask)
    match = match_targets(targets, kernel.token_ids, mask)
    scores = live_rows(numeric_columns("smmd_terms", logits, kernel), match.any(-1)).astype(jnp.float32)
    laplacian = jnp.diag(kernel.gram.sum(1)) - kernel.gram
    mmd, smoothness, total = (
        at_numeric(quadratic_loss(scores, match, form), match) for form in (kernel.gram, laplacian, kernel.form)
    )
    return SmmdTerms(mmd=mmd, smoothness=smoothness, total=total, is_numeric=match.any(-1))


@jax.custom_jvp
def quadratic_loss(
    scores: Float[Array, "*batch N"], match: Bool[Array, "*batch N"], form: Float[Array, "N N"]
) -> Float[Array, "*batch"]:
    """r^T M r for float32 scores; rows without a match hold garbage. The form is a constant: its gradient is 0."""
    return _value_and_gradient(scores, match, form)[0]


@quadratic_loss.defjvp
def _quadratic_loss_jvp(primals, tangents):
    value, gradient = _value_and_gradient(*primals)
    return value, jnp.sum(gradient * tangents[0], axis=-1)


def _value_and_gradient(
    scores: Float[Array, "*batch N"], match: Bool[Array, "*batch N"], form: Float[Array, "N N"]
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch N"]]:
    """The loss and 2 p (u - <p, u>), u = M r, both without cancellation where p is close to the target."""
    p = jax.nn.softmax(scores, axis=-1)
    others = jnp.where(match, 0.0, p)
    # r_t = p_t - 1 would lose its digits; it is minus the sum of the others.
    residual = others - jnp.where(match, jnp.sum(others, axis=-1, keepdims=True), 0.0)
    # The accelerators' default precision would round M r to bfloat16.
    u = jnp.einsum("...i,ij->...j", residual, form, precision=lax.Precision.HIGHEST)
    value = jnp.sum(residual * u, axis=-1)
    # <p, u> = u_t + <others, u - u_t>, since p sums to 1: every term is small where the residual is.
    from_target = u - jnp.sum(jnp.where(match, u, 0.0), axis=-1, keepdims=True)
    gradient = 2.0 * p * (from_target - jnp.sum(others * from_target, axis=-1, keepdims=True))
    return value, gradient


def _is_large(batch: tuple[int, ...], kernel: NumericKernel) -> bool:
    return kernel.form.shape[-1] >= _COMPACT_FROM_TOKENS and math.prod(batch) >= _COMPACT_FROM_ROWS


def _loss_of_numeric_rows(
    source: Float[Array, "*batch V"], columns: Int[Array, "N"], match: Bool[Array, "*batch N"], kernel: NumericKernel
) -> Float[Array, "*batch"]:
    """The loss of source[..., columns] at the rows with a match; exactly 0, value and gradient, at the others."""
    batch, size = match.shape[:-1], match.shape[-1]
    target = jnp.sum(jnp.where(match, jnp.arange(1, size + 1), 0), axis=-1) - 1
    rows = source.reshape(math.prod(batch), source.shape[-1])
    return _compacted_loss(rows, columns, target.reshape(-1), kernel.form).reshape(batch)


@jax.custom_jvp
def _compacted_loss(source, columns, target, form):
    index, (value,) = _scan_numeric_rows(source, columns, target, form, with_gradient=False)
    return _put(value, index, target)


@_compacted_loss.defjvp
def _compacted_loss_jvp(primals, tangents):
    source, columns, target, form = primals
    index, (value, gradient) = _scan_numeric_rows(source, columns, target, form, with_gradient=True)
    # Rows and columns in one gather: its transpose writes the few numbers row by row, where a gather of columns and
    # then of rows would walk down every column of the logits.
    moved = tangents[0].at[index[:, None], columns].get(mode="fill", fill_value=0, unique_indices=True)
    return _put(value, index, target), _put(jnp.sum(gradient * moved, axis=-1), index, target)


def _put(values, index, target):
    return jnp.zeros(target.shape, values.dtype).at[index].set(values, mode="drop", unique_indices=True)


def _scan_numeric_rows(source, columns, target, form, *, with_gradient: bool):
    """Values and gradients of the rows with a target >= 0, and their indices, padded with the number of rows.

    The numeric rows come first and are worked through in blocks, and a block without any is skipped: the work follows
    the count, no row is ever dropped, and no capacity has to be guessed.
    """
    rows, size = len(target), len(columns)
    block = max(_SMALLEST_BLOCK, -(-rows // _BLOCKS))
    index = jnp.nonzero(target >= 0, size=-(-rows // block) * block, fill_value=rows)[0]

    def compute(index):
        live, row = index < rows, jnp.minimum(index, rows - 1)
        scores = source.at[row[:, None], columns].get(mode="promise_in_bounds")
        match = jnp.where(live, target[row], -1)[:, None] == jnp.arange(size)
        value, gradient = _value_and_gradient(live_rows(scores, live).astype(jnp.float32), match, form)
        return (value, gradient) if with_gradient else (value,)

    def skip(index):
        zeros = lambda *shape: zeros_varying_like(shape, source, columns, index, form)
        return (zeros(block), zeros(block, size)) if with_gradient else (zeros(block),)

    def of_block(index):
        return lax.cond(index[0] < rows, compute, skip, index)

    parts = lax.map(of_block, index.reshape(-1, block))
    return index, tuple(part.reshape(-1, *part.shape[2:]) for part in parts)


def zeros_varying_like(shape: tuple[int, ...], *operands: Array) -> Float[Array, "..."]:
    """Float32 zeros that vary over the mesh axes of all operands, as what is computed from them does.

    `shard_map` compares the two at the edges of a loop. The operands are named, never read: select drops even NaN.
    """
    zero = jnp.zeros((), jnp.float32)
    for operand in operands:
        corner = operand[(slice(0, 1),) * operand.ndim]
        zero = jnp.where(False, jnp.sum(corner).astype(jnp.float32), zero)
    return jnp.broadcast_to(zero, shape)


def _on_numeric_rows(function, scores, match):
    """Apply a function of rows; where N is large, to the rows with a numeric target only.

    The rows are compacted to a fixed capacity; if more of them are numeric, the same program computes all rows instead
    (no row is ever dropped). The other rows come back as 0.
    """
    batch, rows, tokens = match.shape[:-1], math.prod(match.shape[:-1]), match.shape[-1]
    if tokens < _COMPACT_FROM_TOKENS or rows < _COMPACT_FROM_ROWS:
        return function(scores, match)
    scores, match = scores.reshape(rows, scores.shape[-1]), match.reshape(rows, tokens)
    numeric = match.any(-1)
    capacity = -(-rows // _COMPACT_SHARE)

    def on_few(scores, match):
        index = jnp.nonzero(numeric, size=capacity, fill_value=rows)[0]
        take = lambda array: array.at[index].get(mode="fill", fill_value=0, indices_are_sorted=True)
        put = lambda part: (
            jnp.zeros((rows, *part.shape[1:]), part.dtype).at[index].set(part, mode="drop", indices_are_sorted=True)
        )
        return jax.tree.map(put, function(take(scores), take(match)))

    result = lax.cond(jnp.sum(numeric) <= capacity, on_few, function, scores, match)
    return jax.tree.map(lambda array: array.reshape(*batch, *array.shape[1:]), result)
