"""Number Token Loss: distances between token values under the softmax over the numeric tokens."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.operands import Vocabulary, absolute, at_numeric, check_positive, numeric_operands, value_differences


def ntl_was_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the Wasserstein-1 form of the Number Token Loss at each position.

        loss = sum_j p_j |v_j - y|,   p = softmax(logits[V_num]),   y the target's value

    Nothing is shifted; nothing is reduced; p is not reweighed by its mass in the whole vocabulary (as in the paper).

    Args:
      logits: [..., V] of any floating dtype; the arithmetic is float32.
      targets: [...] token ids; one that is not numeric contributes exactly 0.
      kernel: a `NumericKernel` or `NumericVocab`; only ids and values are used.
      mask: [...] bool, true where the position counts; masked positions may hold anything.

    Returns:
      [...] float32 in units of the values.

    Raises:
      ValueError, TypeError: as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> float(ntl_was_loss(jnp.zeros(10), jnp.array(0), vocab))
      4.5

    References:
      Zausinger et al., "Regress, Don't Guess: A Regression-like Loss on Number Tokens for Language Models", ICML 2025,
      arXiv 2411.02083 (NTL-WAS).
    """
    scores, match = numeric_operands("ntl_was_loss", logits, targets, kernel, mask)
    return was_columns(scores, match, kernel)


def was_columns(scores: Float[Array, "*batch N"], match: Bool[Array, "*batch N"], kernel: Vocabulary):
    distance = jnp.abs(value_differences(match, kernel))
    return at_numeric(jnp.sum(jax.nn.softmax(scores, axis=-1) * distance, axis=-1), match)


def ntl_mse_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the squared-error form of the Number Token Loss at each position.

        loss = (sum_j p_j v_j - y)^2,   p = softmax(logits[V_num]),   y the target's value

    Its minimum is not unique: half of the mass on 0 and half on 8 is as good for the target 4 as 4 itself.

    Args, Raises: as `ntl_was_loss`.

    Returns:
      [...] float32 in squared units of the values.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> float(ntl_mse_loss(jnp.zeros(10), jnp.array(0), vocab))
      20.25

    References:
      Zausinger et al., "Regress, Don't Guess", ICML 2025, arXiv 2411.02083 (NTL-MSE).
    """
    scores, match = numeric_operands("ntl_mse_loss", logits, targets, kernel, mask)
    return mse_columns(scores, match, kernel)


def ntl_mae_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the absolute-error form of the Number Token Loss at each position.

        loss = |sum_j p_j v_j - y|,   p = softmax(logits[V_num]),   y the target's value

    Args, Raises: as `ntl_was_loss`.

    Returns:
      [...] float32 in units of the values; at most `ntl_was_loss`.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> float(ntl_mae_loss(jnp.zeros(10), jnp.array(0), vocab))
      4.5

    References:
      Zausinger et al., "Regress, Don't Guess", ICML 2025, arXiv 2411.02083 (NTL with any element-wise loss).
    """
    scores, match = numeric_operands("ntl_mae_loss", logits, targets, kernel, mask)
    return mae_columns(scores, match, kernel)


def ntl_huber_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
    delta: float = 1.0,
) -> Float[Array, "*batch"]:
    """Compute the Huber form of the Number Token Loss at each position.

        e = sum_j p_j v_j - y;   loss = e^2 / 2 if |e| <= delta else delta (|e| - delta / 2)

    Args:
      logits, targets, kernel, mask: as `ntl_was_loss`.
      delta: where the square turns into a line, in units of the values; positive.

    Returns:
      [...] float32.

    Raises:
      ValueError: delta that is not positive; and as `ntl_was_loss`.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab([str(digit) for digit in range(10)])
      >>> float(ntl_huber_loss(jnp.zeros(10), jnp.array(0), vocab))
      4.0

    References:
      Zausinger et al., "Regress, Don't Guess", ICML 2025, arXiv 2411.02083 (NTL with any element-wise loss).
      Huber, "Robust Estimation of a Location Parameter", 1964.
    """
    check_positive("ntl_huber_loss", delta=delta)
    scores, match = numeric_operands("ntl_huber_loss", logits, targets, kernel, mask)
    return huber_columns(scores, match, kernel, delta)


def _of_expected_error(element: Callable[[Array], Array], scores, match, kernel):
    """An element-wise loss of the expected error sum_j p_j (v_j - y): taken so, it keeps its digits near 0."""
    error = jnp.sum(jax.nn.softmax(scores, axis=-1) * value_differences(match, kernel), axis=-1)
    # A dead row's error is 0 before the element-wise loss, so that no infinity meets the mask.
    return at_numeric(element(at_numeric(error, match)), match)


def mse_columns(scores, match, kernel):
    return _of_expected_error(jnp.square, scores, match, kernel)


def mae_columns(scores, match, kernel):
    return _of_expected_error(absolute, scores, match, kernel)


def huber_columns(scores, match, kernel, delta: float = 1.0):
    def huber(error):
        size = jnp.abs(error)
        return jnp.where(size <= delta, 0.5 * error**2, delta * (size - 0.5 * delta))

    return _of_expected_error(huber, scores, match, kernel)
