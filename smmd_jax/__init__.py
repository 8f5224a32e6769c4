"""Numeric-aware training losses in JAX: SMMD and every loss it is compared against.

The core needs JAX, NumPy and jaxtyping. Model ports live in `smmd_jax.backbones`, which needs Flax; not imported here.
"""

from smmd_jax.errors import TokenizerError, TokenRangeError
from smmd_jax.kernels import (
    KERNELS,
    NumericKernel,
    default_alpha,
    graph_laplacian,
    laplace_kernel,
    make_numeric_kernel,
    random_kernel,
    rbf_kernel,
    shuffled_kernel,
)
from smmd_jax.losses.chunked import chunked_cross_entropy_and_numeric, chunked_loss_sums
from smmd_jax.losses.cross_entropy import cross_entropy_loss
from smmd_jax.losses.digit_entropy import digit_entropy_loss
from smmd_jax.losses.dist2 import dist2_loss
from smmd_jax.losses.emo import emo_loss
from smmd_jax.losses.gce import gce_loss
from smmd_jax.losses.ntil import NtilTerms, ntil_loss, ntil_terms
from smmd_jax.losses.ntl import ntl_huber_loss, ntl_mae_loss, ntl_mse_loss, ntl_was_loss
from smmd_jax.losses.number_level import number_level_loss
from smmd_jax.losses.smmd import (
    SmmdTerms,
    smmd_loss,
    smmd_loss_from_hidden,
    smmd_loss_from_numeric_logits,
    smmd_terms,
)
from smmd_jax.losses.table import LOSSES, LossSpec
from smmd_jax.numeric_vocab import NumericVocab, make_numeric_vocab, numeric_vocab_from_tokenizer
from smmd_jax.probe import digit_distribution
from smmd_jax.reduce import mean_from, sum_and_count
from smmd_jax.targets import check_targets, numeric_mask, shift_targets

__version__ = "0.1.0"

__all__ = [
    "KERNELS",
    "LOSSES",
    "LossSpec",
    "NtilTerms",
    "NumericKernel",
    "NumericVocab",
    "SmmdTerms",
    "TokenRangeError",
    "TokenizerError",
    "check_targets",
    "chunked_cross_entropy_and_numeric",
    "chunked_loss_sums",
    "cross_entropy_loss",
    "default_alpha",
    "digit_distribution",
    "digit_entropy_loss",
    "dist2_loss",
    "emo_loss",
    "gce_loss",
    "graph_laplacian",
    "laplace_kernel",
    "make_numeric_kernel",
    "make_numeric_vocab",
    "mean_from",
    "ntil_loss",
    "ntil_terms",
    "ntl_huber_loss",
    "ntl_mae_loss",
    "ntl_mse_loss",
    "ntl_was_loss",
    "number_level_loss",
    "numeric_mask",
    "numeric_vocab_from_tokenizer",
    "random_kernel",
    "rbf_kernel",
    "shift_targets",
    "shuffled_kernel",
    "smmd_loss",
    "smmd_loss_from_hidden",
    "smmd_loss_from_numeric_logits",
    "smmd_terms",
    "sum_and_count",
]


def __dir__() -> list[str]:
    """List the public names alone: the modules that they come from are no part of the interface."""
    return [*__all__, "__version__"]
