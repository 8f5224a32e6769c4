"""SMMD: one quadratic form of the residual p - q over the numeric tokens, from logits, hidden states or columns."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.kernels import NumericKernel
from smmd_jax.losses.numeric_rows import COLUMNS, PRODUCTS, loss_of_numeric_rows
from smmd_jax.losses.quadratic import quadratic_loss
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
        match = match_targets(targets, kernel.token_ids, mask)
        return loss_of_numeric_rows(COLUMNS, (logits, kernel.token_ids), match, kernel.form)
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
    if _is_large(targets.shape, kernel):
        return loss_of_numeric_rows(PRODUCTS, (hidden, columns), match, kernel.form)
    # NaN in a dead row would reach the head's gradient through the product.
    hidden = live_rows(hidden, match.any(-1))
    scores = jnp.einsum("...d,dn->...n", hidden, columns, preferred_element_type=jnp.float32)
    return smmd_columns(scores, match, kernel)


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
        return loss_of_numeric_rows(COLUMNS, (scores, jnp.arange(scores.shape[-1])), match, kernel.form)
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


def _is_large(batch: tuple[int, ...], kernel: NumericKernel) -> bool:
    return kernel.form.shape[-1] >= _COMPACT_FROM_TOKENS and math.prod(batch) >= _COMPACT_FROM_ROWS
