"""Token ids as a model takes them: rows of 32-bit integers, none of which has wrapped into another token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

_LARGEST = np.iinfo(np.int32).max


def as_token_ids(input_ids: Any) -> Int[Array, "B T"]:
    """Return token ids as an array, int32 unless they were an array of jax before.

    An id beyond 32 bits, which jax would cut down to another token, becomes one outside every vocabulary.

    Raises:
        ValueError: no integers [B, T], or no row or no token.

    Example:
        >>> as_token_ids(np.array([[3, 2**32 + 3]])).tolist()
        [[3, 2147483647]]
    """
    array = input_ids if isinstance(input_ids, jax.Array) else np.asarray(input_ids)
    if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"input_ids is {array.dtype}{list(array.shape)}, wanted integers [B, T]")
    if 0 in array.shape:
        raise ValueError(f"input_ids has shape {list(array.shape)}, wanted at least one row and one token")
    if isinstance(array, np.ndarray):
        array = np.clip(array, -1 if array.dtype.kind == "i" else 0, _LARGEST).astype(np.int32)
    return jnp.asarray(array)
