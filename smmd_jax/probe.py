"""The paper's probe: which number the model predicts, on average, where each number was due."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.operands import Vocabulary, numeric_operands


def digit_distribution(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: Vocabulary,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> tuple[Float[Array, "N N"], Int[Array, "N"]]:
    """Sum the predicted distribution over the numeric tokens for each target value.

        sum[i] = sum over positions with target i of softmax(logits[V_num]),   count[i] = how many there are

    Sums and counts of batches and shards add; sum / count[:, None] is the mean distribution (rows in order of value).

    Args:
      logits: [..., V] of any floating dtype.
      targets: [...] token ids; those that are not numeric are left out.
      kernel: a `NumericKernel` or `NumericVocab`, N tokens.
      mask: [...] bool, true where the position counts.

    Returns:
      (sum [N, N] float32, count [N] int32).

    Raises:
      ValueError, TypeError: as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_vocab
      >>> vocab = make_numeric_vocab({"0": 0, "1": 1})
      >>> total, count = digit_distribution(jnp.zeros((3, 4)), jnp.array([1, 1, 2]), vocab)
      >>> total.tolist(), count.tolist()
      ([[0.0, 0.0], [1.0, 1.0]], [0, 2])

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, arXiv 2606.27731 (probe of
      the predicted digit distribution).
    """
    scores, match = numeric_operands("digit_distribution", logits, targets, kernel, mask)
    size = match.shape[-1]
    rows = match.reshape(-1, size)
    p = jax.nn.softmax(scores, axis=-1).reshape(-1, size)
    total = jnp.einsum("ri,rj->ij", rows.astype(jnp.float32), p, precision=lax.Precision.HIGHEST)
    return total, jnp.sum(rows, axis=0, dtype=jnp.int32)
