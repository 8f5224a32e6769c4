"""EMO: the expected transport cost to the target, with the numeric kernel as the similarity of tokens."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.kernels import NumericKernel
from smmd_jax.losses.cross_entropy import log_normalizer
from smmd_jax.operands import at_numeric, check_vocabulary, full_operands, numeric_columns


def emo_loss(
    logits: Float[Array, "*batch V"],
    targets: Int[Array, "*batch"],
    kernel: NumericKernel,
    *,
    mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, "*batch"]:
    """Compute the Earth Mover Distance Optimisation loss at each numeric position.

        loss = 1 - sum_j p_j <e_y, e_j> = sum_{j in V_num} p_j (1 - K_yj) + (1 - sum_{j in V_num} p_j)

    p is the softmax over the whole vocabulary. EMO asks for unit vectors e_j of the tokens and takes rows of the frozen
    head; here they are the feature vectors of the numeric kernel (<e_i, e_j> = K_ij, K_ii = 1), and text tokens are
    orthogonal to numbers. The paper's mix is CE + stop_gradient(CE / EMO) EMO, up to its factor 1/2 on both.

    Args:
      logits, targets, mask: as `gce_loss`.
      kernel: a `NumericKernel` (its `gram` is the similarity).

    Returns:
      [...] float32 in [0, 1] for a non-negative kernel.

    Raises:
      ValueError, TypeError: as `smmd_loss`.

    Example:
      >>> from smmd_jax import make_numeric_kernel, make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab({"0": 0, "1": 1}))
      >>> round(float(emo_loss(jnp.zeros(4), jnp.array(0), kernel)), 5)     # 1 - (1 + 0.88250) / 4
      0.52938

    References:
      Ren, Wu, Zhu, "EMO: Earth Mover Distance Optimization for Auto-Regressive Language Modeling", ICLR 2024,
      arXiv 2310.04691.
    """
    check_vocabulary("emo_loss", kernel, NumericKernel)
    logits, match = full_operands("emo_loss", logits, targets, kernel, mask)
    log_p = numeric_columns("emo_loss", logits, kernel) - log_normalizer(logits)[..., None]
    p = jnp.exp(log_p)
    similarity = jnp.take(lax.stop_gradient(kernel.gram), jnp.argmax(match, axis=-1), axis=0)
    text = 1.0 - jnp.sum(p, axis=-1)
    return at_numeric(jnp.sum(p * (1.0 - similarity), axis=-1) + text, match)
