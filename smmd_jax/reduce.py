"""Reductions that carry numerator and denominator apart until the one division, over the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from smmd_jax.operands import as_array, as_host_array, check_real


def sum_and_count(
    values: Float[Array, "*batch"], mask: Bool[Array, "*batch"]
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum the values under a mask and count them; sums and counts of micro-batches or shards simply add.

        sum = sum of values where mask,   count = number of true positions of mask

    Args:
      values: [...] one value per position; those outside the mask may be anything, NaN too.
      mask: [...] bool, the same shape.

    Returns:
      (sum, count): a float32 and an int32 scalar.

    Raises:
      ValueError: the shapes differ.
      TypeError: values that are not real numbers, or a mask that is not boolean.

    Example:
      >>> sum_and_count(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False]))
      (Array(3., dtype=float32), Array(2, dtype=int32))
    """
    values, mask = as_array("sum_and_count: values", values), as_array("sum_and_count: mask", mask)
    check_real("sum_and_count: values", values)
    if values.shape != mask.shape:
        raise ValueError(f"sum_and_count: values {values.shape} and mask {mask.shape} must have the same shape.")
    if mask.dtype != jnp.bool_:
        raise TypeError(f"sum_and_count: mask must be boolean, got {mask.dtype}; pass mask != 0.")
    total = jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32)
    return total, jnp.sum(mask, dtype=jnp.int32)


def mean_from(
    sum: Num[Array, "*batch"] | float, count: Num[Array, "*batch"] | float
) -> Float[Array, "*batch"]:
    """Divide a sum by its count; the mean over nothing is 0, with zero gradient.

        mean = sum / count if count > 0 else 0

    Args:
      sum: [...] a sum of values.
      count: [...] how many values went into it.

    Returns:
      [...] float32.

    Raises:
      TypeError: a sum or count that is not a real number.

    Example:
      >>> mean_from(jnp.float32(6.0), jnp.int32(3)), mean_from(jnp.float32(0.0), jnp.int32(0))
      (Array(2., dtype=float32), Array(0., dtype=float32))
    """
    sum, count = _as_float32("mean_from: sum", sum), _as_float32("mean_from: count", count)
    return jnp.where(count > 0, sum, 0.0) / jnp.where(count > 0, count, 1.0)


def _as_float32(what: str, operand: Any) -> Float[Array, "*batch"]:
    """On the host where it is there: a count of 64 bits would wrap under int32."""
    array = operand if isinstance(operand, jax.Array) else as_host_array(what, operand)
    check_real(what, array)
    return jnp.asarray(array.astype(np.float32))
