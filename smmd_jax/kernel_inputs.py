"""What kernels are built from, checked: values and their distances, bandwidths, seeds, matrices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from smmd_jax.scalars import as_integer, as_real


def distances(values: np.ndarray, rescale: float | None) -> np.ndarray:
    distance = np.abs(values[:, None] - values[None, :])
    if rescale is None:
        return distance
    number = as_real(rescale)
    if number is None or not math.isfinite(number) or number <= 1:
        raise ValueError(f"rescale must be a finite number above 1 or None, got {rescale!r}.")
    rescale = number
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


def checked_values(values: Any) -> np.ndarray:
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


def checked_sigmas(sigma: Any) -> list[float]:
    if isinstance(sigma, jax.core.Tracer):
        raise TypeError("sigma must be a Python number: kernels are built on the host, outside jit.")
    several = isinstance(sigma, Sequence | np.ndarray | jax.Array) and not isinstance(sigma, str) and np.ndim(sigma) > 0
    sigmas = [as_real(s) for s in (sigma if several else [sigma])]
    if not sigmas or not all(s is not None and math.isfinite(s) and s > 0 for s in sigmas):
        raise ValueError(f"sigma must be a positive finite number or a non-empty sequence of them, got {sigma!r}.")
    # 1 / sigma must not overflow: exp(-(0 / 0)) would put NaN on the diagonal.
    if min(sigmas) < 1e-150:
        raise ValueError(f"sigma must be at least 1e-150 to stay finite in float64, got {sigma!r}.")
    return sigmas


def checked_gram(gram: Any) -> np.ndarray:
    if isinstance(gram, jax.core.Tracer):
        raise TypeError("kernel matrices are built on the host in float64: call this outside jit.")
    try:
        array = np.asarray(gram)
    except ValueError:
        raise TypeError(f"a kernel matrix must be an array, got a ragged {type(gram).__name__}.") from None
    if array.dtype.kind not in "fiu" and not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"a kernel matrix must hold real numbers, got {type(gram).__name__} of dtype {array.dtype}.")
    array = array.astype(np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise ValueError(f"a kernel matrix must be square and non-empty, got shape {array.shape}.")
    if not np.isfinite(array).all() or not np.allclose(array, array.T, rtol=0, atol=1e-6):
        raise ValueError("a kernel matrix must be finite and symmetric; this one is not.")
    return array


def checked_seed(seed: Any) -> int:
    number = as_integer(seed)
    if number is None or number < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}.")
    return number


def at_least_one(name: str, value: Any) -> int:
    number = as_integer(value)
    if number is None or number < 1:
        raise ValueError(f"random_kernel: {name} must be an integer of at least 1, got {value!r}.")
    return number
