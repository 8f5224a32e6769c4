"""Kernels over token values, their graph Laplacian, and `NumericKernel`, the one matrix that SMMD needs.

Everything here runs once per tokenizer, on the host, in float64; only the finished matrices are stored in float32.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Real

from smmd_jax.kernel_inputs import at_least_one, checked_gram, checked_seed, checked_sigmas, checked_values, distances
from smmd_jax.numeric_vocab import NumericVocab
from smmd_jax.scalars import as_real

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
    sigmas = checked_sigmas(sigma)
    distance = distances(checked_values(values), rescale)
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
    sigmas = checked_sigmas(sigma)
    distance = distances(checked_values(values), rescale)
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
    checked = checked_values(values)
    return rbf_kernel(np.random.default_rng(checked_seed(seed)).permutation(checked), sigma)


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
    features, power = at_least_one("features", features), at_least_one("power", power)
    rng = np.random.default_rng(checked_seed(seed))
    signs = rng.choice([-1.0, 1.0], size=(checked_values(values).size, features))
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
    gram = checked_gram(gram)
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
    mean_degree = float(checked_gram(gram).sum(1).mean())
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
        # The vocabulary's report fills a page and has a place of its own: print(kernel.vocab).
        alpha = "traced"
        if not isinstance(self.alpha, jax.core.Tracer):
            # A tree of kernels may hold shapes, shardings or a batch instead.
            is_number = isinstance(self.alpha, jax.Array | np.ndarray | float) and np.ndim(self.alpha) == 0
            alpha = f"{float(self.alpha):.6g}" if is_number else type(self.alpha).__name__
        size = getattr(self.gram, "shape", ("?",))[-1]
        report = self.vocab.report
        span = f"{report.smallest_value:.9g} to {report.largest_value:.9g}"
        return f"NumericKernel(N={size}, alpha={alpha}, policy={report.policy!r}, values {span})"


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
      kernel: a name in `KERNELS`, or a function from [N] values to a positive semi-definite [N, N] matrix. It is given
        sigma, rescale and seed by name where it takes them and they are not at their defaults.
      sigma: bandwidth or bandwidths in units of the values, for a kernel that has one.
      alpha: weight of the smoothness term; None takes `default_alpha`.
      rescale: upper end of the rescaled distances (9 in the authors' release); None keeps the values' own distances.
      seed: seed of the shuffled and the random kernel; the others draw nothing.
      terms: "smmd", "mmd" or "smoothness" (weighed by alpha, as in the paper's ablation).

    Returns:
      A `NumericKernel`.

    Raises:
      ValueError: an unknown kernel or terms (the known ones are listed), alpha given with terms="mmd", alpha negative
        or not finite, a sigma or rescale that the kernel does not take, a function of your own whose K or M is not
        positive semi-definite (`functools.partial(random_kernel, power=5)` apart), or what the kernel itself refuses.
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
    gram = checked_gram(_gram(values, kernel, sigma=sigma, rescale=rescale, seed=seed))
    if len(gram) != len(values):
        raise ValueError(f"make_numeric_kernel: the kernel is {gram.shape} for {len(values)} values.")
    if terms == "mmd":
        alpha = 0.0
    elif alpha is None:
        alpha = default_alpha(gram)
    elif (number := as_real(alpha)) is None or not math.isfinite(number) or number < 0:
        raise ValueError(f"make_numeric_kernel: alpha must be finite and at least 0, got {alpha!r}.")
    form = TERMS[terms](gram, float(alpha))
    with np.errstate(over="ignore"):
        stored = np.asarray(form, np.float32)
    if not np.isfinite(stored).all():
        raise ValueError(f"make_numeric_kernel: the kernel with alpha={alpha!r} leaves the range of float32.")
    if callable(kernel):
        _check_definite(kernel, gram, form)
    as_float32 = lambda array: jnp.asarray(np.asarray(array, np.float32))
    return NumericKernel(vocab=vocab, gram=as_float32(gram), alpha=as_float32(alpha), form=as_float32(form))


def _gram(values: np.ndarray, kernel: str | Callable, **options: Any) -> np.ndarray:
    """Call the kernel with those options that it takes; one that it does not take must stand at its default."""
    if callable(kernel):
        name, function = _name_of(kernel), kernel
    elif isinstance(kernel, str) and kernel in KERNELS:
        name, function = repr(kernel), KERNELS[kernel]
    else:
        raise ValueError(f"make_numeric_kernel: unknown kernel {kernel!r}; known: {', '.join(KERNELS)}, or a function.")
    taken = _options_of(function)
    defaults = inspect.signature(make_numeric_kernel).parameters
    given = {key: value for key, value in options.items() if value is not defaults[key].default}
    given = {key: value for key, value in given.items() if as_real(value) is None or value != defaults[key].default}
    for key in ("sigma", "rescale"):
        if key in given and key not in taken:
            raise ValueError(f"make_numeric_kernel: kernel {name} takes no {key} (got {given[key]!r}); leave it out.")
    # A function of one's own keeps its own defaults.
    passed = given if callable(kernel) else options
    return function(values, **{key: value for key, value in passed.items() if key in taken})


def _options_of(function: Callable) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # functions written in C may have no signature
        return set()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}


def _name_of(function: Callable) -> str:
    function = function.func if isinstance(function, functools.partial) else function
    return getattr(function, "__name__", repr(function))


def _check_definite(kernel: Callable, gram: Gram, form: Gram) -> None:
    """Refuse what would make the loss negative; the authors' own odd power of the random kernel is let through."""
    for matrix, what in ((gram, "K"), (form, "M")):
        spectrum = np.linalg.eigvalsh((matrix + matrix.T) / 2)
        # a kernel may come in float32
        if spectrum[0] >= -1e-6 * max(spectrum[-1], -spectrum[0]):
            continue
        if isinstance(kernel, functools.partial) and kernel.func is random_kernel:
            continue
        raise ValueError(
            f"make_numeric_kernel: {what} of kernel {_name_of(kernel)} is not positive semi-definite: its eigenvalues "
            f"go from {spectrum[0]:.3g} to {spectrum[-1]:.3g}, so the loss could be negative; use a positive "
            "semi-definite kernel without negative entries."
        )
