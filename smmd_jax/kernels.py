"""Kernels over token values, their graph Laplacian, and `NumericKernel`, the one matrix that SMMD needs.

Everything here runs once per tokenizer, on the host, in float64; only the finished matrices are stored in float32.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Real

from smmd_jax.numeric_vocab import NumericVocab

Gram = Float64[np.ndarray, "N N"]
Values = Real[Any, "N"] | Sequence[float]
Matrix = Real[Any, "N N"] | Sequence[Sequence[float]]
Sigma = float | Sequence[float]


def rbf_kernel(values: Values, sigma: Sigma = 2.0, *, rescale: float | None = None) -> Gram:
    """Build the Gaussian kernel over token values.

        K_ij = mean over sigma of exp(-d_ij^2 / (2 sigma^2)),   d_ij = |v_i - v_j|

    Args:
      values: [N] token values, in any order.
      sigma: bandwidth in units of the values, or several of them (the mean of their kernels).
      rescale: map the non-zero distances linearly onto [1, rescale] first, as the authors' released code does with 9.

    Returns:
      [N, N] float64 NumPy array, symmetric, ones on the diagonal, positive semi-definite.

    Raises:
      ValueError: a sigma that is not positive and finite; values that are not a finite vector; a `rescale` that would
        make the kernel indefinite.

    Example:
      >>> rbf_kernel([0.0, 1.0, 2.0]).round(4)
      array([[1.    , 0.8825, 0.6065],
             [0.8825, 1.    , 0.8825],
             [0.6065, 0.8825, 1.    ]])

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, arXiv 2606.27731.
      Gretton et al., "A Kernel Two-Sample Test", JMLR 2012, section 2.2.
    """
    sigmas = _checked_sigmas(sigma)
    distance = _distances(_checked_values(values), rescale)
    return np.mean([np.exp(-0.5 * (distance / s) ** 2) for s in sigmas], axis=0)


def laplace_kernel(values: Values, sigma: Sigma = 2.0, *, rescale: float | None = None) -> Gram:
    """Build the Laplace kernel over token values.

        K_ij = mean over sigma of exp(-d_ij / sigma),   d_ij = |v_i - v_j|

    Args, Returns, Raises: as `rbf_kernel`.

    Example:
      >>> laplace_kernel([0.0, 2.0]).round(4)
      array([[1.    , 0.3679],
             [0.3679, 1.    ]])

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, arXiv 2606.27731 (ablation).
    """
    sigmas = _checked_sigmas(sigma)
    distance = _distances(_checked_values(values), rescale)
    return np.mean([np.exp(-distance / s) for s in sigmas], axis=0)


def shuffled_kernel(values: Values, sigma: Sigma = 2.0, *, seed: int = 0) -> Gram:
    """Build the Gaussian kernel of a random permutation of the values: same spectrum, no numeric meaning.

        K_ij = k(v_perm(i), v_perm(j)),   k the kernel of `rbf_kernel`, perm drawn from `numpy.random.default_rng(seed)`

    Args:
      values: [N] token values.
      sigma: as for `rbf_kernel`.
      seed: seed of the permutation.

    Returns:
      [N, N] float64 NumPy array.

    Example:
      >>> K, shuffled = rbf_kernel(np.arange(5.0)), shuffled_kernel(np.arange(5.0))
      >>> bool(np.allclose(np.sort(K.ravel()), np.sort(shuffled.ravel())))
      True

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, arXiv 2606.27731
      (ablation "shuffled mapping").
    """
    checked = _checked_values(values)
    return rbf_kernel(np.random.default_rng(_checked_seed(seed)).permutation(checked), sigma)


def random_kernel(values: Values, *, seed: int = 0, features: int = 4, power: int = 4) -> Gram:
    """Build a kernel that ignores the values: an element-wise power of the Gram matrix of random signs.

        K_ij = (z_i . z_j)^power,   z_i in {-1, +1}^features / sqrt(features)

    An even power is positive semi-definite and non-negative. The authors' release uses the odd power 5, which has
    negative entries, so its quadratic form is indefinite; `power=5` gives that kernel for comparison.

    Args:
      values: [N] token values; only their number is used.
      seed: seed of the signs.
      features: length of the sign vectors, at least 1.
      power: exponent, at least 1.

    Returns:
      [N, N] float64 NumPy array with ones on the diagonal.

    Example:
      >>> bool((random_kernel(np.arange(10.0)) >= 0).all())
      True

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, arXiv 2606.27731,
      appendix C.4 (ablation "random kernel").
    """
    for name, number in (("features", features), ("power", power)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"random_kernel: {name} must be an integer of at least 1, got {number!r}.")
    rng = np.random.default_rng(_checked_seed(seed))
    signs = rng.choice([-1.0, 1.0], size=(_checked_values(values).size, features))
    return (signs @ signs.T / features) ** power


KERNELS: dict[str, Callable[..., Gram]] = {
    "rbf": rbf_kernel,
    "laplace": laplace_kernel,
    "shuffled": shuffled_kernel,
    "random": random_kernel,
}


def graph_laplacian(gram: Matrix) -> Gram:
    """Build the Laplacian of the graph whose edge weights are a kernel.

        Lap = D - K,   D = diag(row sums of K, diagonal included)

    Args:
      gram: [N, N] symmetric kernel matrix.

    Returns:
      [N, N] float64 NumPy array; its rows sum to 0.

    Example:
      >>> graph_laplacian([[1.0, 0.5], [0.5, 1.0]])
      array([[ 0.5, -0.5],
             [-0.5,  0.5]])

    References:
      Belkin and Niyogi, "Laplacian Eigenmaps for Dimensionality Reduction and Data Representation", 2003, section 2.
    """
    gram = _checked_gram(gram)
    return np.diag(gram.sum(1)) - gram


def default_alpha(gram: Matrix) -> float:
    """Give the weight of the smoothness term that the paper derives from the mean degree.

        alpha = 1 / (2 mean_i D_ii),   D_ii = sum_j K_ij with the diagonal

    Args:
      gram: [N, N] symmetric kernel matrix.

    Returns:
      A Python float; 0.118199 for the ten digits at sigma 2.

    Raises:
      ValueError: the mean degree is not positive (only a kernel with negative entries can do that).

    Example:
      >>> round(default_alpha(rbf_kernel(np.arange(10.0))), 10)
      0.1181994508

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, arXiv 2606.27731.
    """
    mean_degree = float(_checked_gram(gram).sum(1).mean())
    if mean_degree <= 0:
        raise ValueError(f"default_alpha: the kernel's mean degree is {mean_degree:.6g}, not positive; pass alpha.")
    return 1.0 / (2.0 * mean_degree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NumericKernel:
    """A numeric vocabulary with the quadratic form that SMMD takes over it; a pytree, made by `make_numeric_kernel`.

    Pass it to a jitted function as an argument: closed over, its N x N matrices become constants of the program.

    Attributes:
      vocab: the `NumericVocab` (token ids and values).
      gram: [N, N] float32, the kernel matrix K.
      alpha: [] float32, the weight of the smoothness term; 0 for terms="mmd".
      form: [N, N] float32, the matrix M of the loss r^T M r.
    """

    # Any: inside jax a leaf may be a shape, a sharding or a batch, and a type checker at run time would refuse those.
    vocab: NumericVocab | Any
    gram: Float[Array, "N N"] | Any
    alpha: Float[Array, ""] | Any
    form: Float[Array, "N N"] | Any

    @property
    def token_ids(self) -> Int[Array, "N"]:
        return self.vocab.token_ids

    @property
    def values(self) -> Float[Array, "N"]:
        return self.vocab.values

    @property
    def min_vocab_size(self) -> int:
        return self.vocab.min_vocab_size

    def __repr__(self) -> str:
        alpha = "traced" if isinstance(self.alpha, jax.core.Tracer) else f"{float(self.alpha):.6g}"
        return f"NumericKernel(N={self.gram.shape[-1]}, alpha={alpha}, vocab={self.vocab!r})"


TERMS: dict[str, Callable[[Gram, float], Gram]] = {
    "smmd": lambda gram, alpha: gram + alpha * graph_laplacian(gram),
    "mmd": lambda gram, alpha: gram,
    "smoothness": lambda gram, alpha: alpha * graph_laplacian(gram),
}


def make_numeric_kernel(
    vocab: NumericVocab,
    *,
    kernel: str | Callable[[np.ndarray], Any] = "rbf",
    sigma: Sigma = 2.0,
    alpha: float | None = None,
    rescale: float | None = None,
    seed: int = 0,
    terms: str = "smmd",
) -> NumericKernel:
    """Build the kernel, its Laplacian and the quadratic form of SMMD for a numeric vocabulary.

        smmd:        M = K + alpha (D - K)        mmd:  M = K        smoothness:  M = alpha (D - K)

    K, D and M are made in float64 on the host, once, and stored in float32.

    Args:
      vocab: the numeric vocabulary, N tokens.
      kernel: a name in `KERNELS`, or a function from [N] values to an [N, N] matrix.
      sigma: bandwidth or bandwidths in units of the values; the random kernel and a function of your own have none.
      alpha: weight of the smoothness term; None takes `default_alpha`.
      rescale: upper end of the rescaled distances (9 in the authors' release); None keeps the values' own distances.
      seed: seed of the shuffled and the random kernel.
      terms: "smmd", "mmd" or "smoothness" (weighed by alpha, as in the paper's ablation).

    Returns:
      A `NumericKernel`.

    Raises:
      ValueError: an unknown kernel or terms (the known ones are listed), alpha given with terms="mmd", alpha negative
        or not finite, rescale for a kernel without distances, or what the kernel function itself refuses.
      TypeError: vocab is not a `NumericVocab`.

    Example:
      >>> from smmd_jax.numeric_vocab import make_numeric_vocab
      >>> kernel = make_numeric_kernel(make_numeric_vocab([str(digit) for digit in range(10)]))
      >>> kernel.form.shape, round(float(kernel.alpha), 6)
      ((10, 10), 0.118199)

    References:
      Zuo et al., "Enhancing Numerical Prediction in LLMs via Smooth MMD Alignment", 2026, arXiv 2606.27731.
    """
    if not isinstance(vocab, NumericVocab):
        raise TypeError(
            f"make_numeric_kernel: vocab must be a NumericVocab, got {type(vocab).__name__}; "
            "make one with make_numeric_vocab or numeric_vocab_from_tokenizer."
        )
    if not isinstance(terms, str) or terms not in TERMS:
        raise ValueError(f"make_numeric_kernel: unknown terms {terms!r}; known: {', '.join(TERMS)}.")
    if terms == "mmd" and alpha is not None:
        raise ValueError(f"make_numeric_kernel: terms='mmd' has no smoothness term, so alpha={alpha!r} has no meaning.")
    values = np.asarray(vocab.values, np.float64)
    gram = _checked_gram(_gram(values, kernel, sigma=sigma, rescale=rescale, seed=seed))
    if len(gram) != len(values):
        raise ValueError(f"make_numeric_kernel: the kernel is {gram.shape} for {len(values)} values.")
    if terms == "mmd":
        alpha = 0.0
    elif alpha is None:
        alpha = default_alpha(gram)
    elif not _is_number(alpha) or not math.isfinite(alpha) or alpha < 0:
        raise ValueError(f"make_numeric_kernel: alpha must be finite and at least 0, got {alpha!r}.")
    form = TERMS[terms](gram, float(alpha))
    with np.errstate(over="ignore"):
        stored = np.asarray(form, np.float32)
    if not np.isfinite(stored).all():
        raise ValueError(f"make_numeric_kernel: the kernel with alpha={alpha!r} leaves the range of float32.")
    as_float32 = lambda array: jnp.asarray(np.asarray(array, np.float32))
    return NumericKernel(vocab=vocab, gram=as_float32(gram), alpha=as_float32(alpha), form=as_float32(form))


def _gram(values: np.ndarray, kernel: str | Callable, **options: Any) -> np.ndarray:
    """Call the kernel with those options that it has; `rescale` for a kernel that has no distances is refused."""
    if callable(kernel):
        function, name, accepted = kernel, getattr(kernel, "__name__", repr(kernel)), {}
    elif isinstance(kernel, str) and kernel in KERNELS:
        function, name, accepted = KERNELS[kernel], kernel, inspect.signature(KERNELS[kernel]).parameters
    else:
        raise ValueError(f"make_numeric_kernel: unknown kernel {kernel!r}; known: {', '.join(KERNELS)}, or a function.")
    if options["rescale"] is not None and "rescale" not in accepted:
        raise ValueError(f"make_numeric_kernel: kernel {name!r} takes no rescale (got {options['rescale']!r}).")
    return function(values, **{key: value for key, value in options.items() if key in accepted})


def _distances(values: np.ndarray, rescale: float | None) -> np.ndarray:
    distance = np.abs(values[:, None] - values[None, :])
    if rescale is None:
        return distance
    if not _is_number(rescale) or not math.isfinite(rescale) or rescale <= 1:
        raise ValueError(f"rescale must be a finite number above 1 or None, got {rescale!r}.")
    apart = distance > 0
    if not apart.any():
        return distance
    smallest, largest = float(distance[apart].min()), float(distance.max())
    if (rescale - 1.0) * smallest > largest - smallest:
        raise ValueError(
            f"rescale={rescale:g} makes the kernel indefinite on these values: (rescale - 1) * smallest distance = "
            f"{(rescale - 1.0) * smallest:g} exceeds largest - smallest = {largest - smallest:g}; "
            "use a smaller rescale, or None."
        )
    slope = (rescale - 1.0) / (largest - smallest)
    return np.where(apart, 1.0 + (distance - smallest) * slope, 0.0)


def _checked_values(values: Any) -> np.ndarray:
    if isinstance(values, jax.core.Tracer):
        raise TypeError("kernels are built on the host in float64: call the kernel outside jit and pass its result in.")
    array = np.asarray(values)
    if array.dtype.kind not in "fiu" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"kernel values must be real numbers, got dtype {array.dtype}.")
    array = array.astype(np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"kernel values must be a non-empty vector of finite numbers, got shape {array.shape}"
                         + ("." if array.ndim != 1 or array.size == 0 else " with NaN or infinity in it."))
    return array


def _checked_sigmas(sigma: Sigma) -> list[float]:
    if isinstance(sigma, jax.core.Tracer):
        raise TypeError("sigma must be a Python number: kernels are built on the host, outside jit.")
    several = isinstance(sigma, Sequence | np.ndarray | jax.Array) and not isinstance(sigma, str) and np.ndim(sigma) > 0
    sigmas = list(sigma) if several else [sigma]
    if not sigmas or not all(_is_number(s) and math.isfinite(s) and s > 0 for s in sigmas):
        raise ValueError(f"sigma must be a positive finite number or a non-empty sequence of them, got {sigma!r}.")
    # 1 / sigma must not overflow: exp(-(0 / 0)) would put NaN on the diagonal.
    if min(float(s) for s in sigmas) < 1e-150:
        raise ValueError(f"sigma must be at least 1e-150 to stay finite in float64, got {sigma!r}.")
    return [float(s) for s in sigmas]


def _checked_gram(gram: Any) -> np.ndarray:
    if isinstance(gram, jax.core.Tracer):
        raise TypeError("kernel matrices are built on the host in float64: call this outside jit.")
    array = np.asarray(gram, np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise ValueError(f"a kernel matrix must be square and non-empty, got shape {array.shape}.")
    if not np.isfinite(array).all() or not np.allclose(array, array.T, rtol=0, atol=1e-6):
        raise ValueError("a kernel matrix must be finite and symmetric; this one is not.")
    return array


def _checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}.")
    return int(seed)


def _is_number(number: Any) -> bool:
    """Say whether this is a real scalar; bool, str and complex are not."""
    if isinstance(number, bool | np.bool_ | str | bytes) or np.ndim(number) != 0:
        return False
    return isinstance(number, int | float | np.integer | np.floating | jax.Array)
