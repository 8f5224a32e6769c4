"""Plain numbers out of whatever holds one: Python, NumPy and JAX scalars alike, arrays without an axis too."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_integer(value: Any) -> int | None:
    """The integer that a scalar holds; None for what holds none: bool, float, a string, a traced value."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except (TypeError, IndexError):
        return None


def as_real(value: Any) -> float | None:
    """The real number that a scalar holds, infinity beyond float64; None for bool, complex, str, a traced value."""
    integer = as_integer(value)
    if integer is not None:
        try:
            return float(integer)
        except OverflowError:
            return math.inf if integer > 0 else -math.inf
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    return float(value) if value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating) else None
