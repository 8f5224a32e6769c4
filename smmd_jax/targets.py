"""Targets: the one place that moves them by one, the host check of their range, and which of them are numbers."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from smmd_jax.errors import TokenRangeError
from smmd_jax.operands import (
    Vocabulary,
    as_array,
    as_host_array,
    as_integers,
    as_token_ids,
    check_mask,
    check_targets_dtype,
    check_vocabulary,
    match_targets,
)
from smmd_jax.scalars import as_integer


def shift_targets(
    ids: Int[Any, "*batch T"], mask: Bool[Any, "*batch T"]
) -> tuple[Int[Any, "*batch T-1"], Bool[Any, "*batch T-1"]]:
    """Turn token ids into next-token targets: position t predicts token t + 1.

        targets[..., t] = ids[..., t + 1],   mask[..., t] = mask[..., t + 1];   the inputs are ids[..., :-1]

    No other function of this package shifts anything. NumPy arrays stay NumPy arrays.

    Args:
      ids: [..., T] token ids, T at least 1.
      mask: [..., T] bool, true where the token itself is to be learnt (the answer, not the prompt).

    Returns:
      (targets [..., T-1], mask [..., T-1]).

    Raises:
      ValueError: shapes that differ, or no T axis.
      TypeError: ids that are not integers, or a mask that is not boolean.

    Example:
      >>> targets, mask = shift_targets(np.array([7, 8, 9, 2]), np.array([False, False, True, True]))
      >>> targets, mask
      (array([8, 9, 2]), array([False,  True,  True]))
    """
    ids = ids if isinstance(ids, jax.Array) else as_integers("shift_targets: ids", ids)
    mask = mask if isinstance(mask, jax.Array) else as_host_array("shift_targets: mask", mask)
    if ids.shape != mask.shape or ids.ndim == 0 or ids.shape[-1] == 0:
        raise ValueError(
            f"shift_targets: ids {ids.shape} and mask {mask.shape} must have the same shape [..., T] with T >= 1."
        )
    check_targets_dtype("shift_targets: ids", ids)
    check_mask("shift_targets", mask, ids.shape)
    return ids[..., 1:], mask[..., 1:]


def check_targets(targets: Any, vocab_size: int, *, mask: Any = None) -> None:
    """Raise if an unmasked target is no token of the vocabulary. Host only: call it on every batch before the device.

        0 <= targets < vocab_size   wherever mask is true

    Args:
      targets: [...] integers, any integer dtype (int64 is checked before JAX would wrap it).
      vocab_size: width V of the model's head.
      mask: [...] bool; None checks every position.

    Raises:
      TokenRangeError: the first bad target, with its row, column, value and V, and how many there are.
      ValueError, TypeError: shapes that differ, targets that are no integers, a mask that is not boolean, tracers.

    Example:
      >>> check_targets(np.array([[3, -100]]), 10, mask=np.array([[True, False]]))
      >>> check_targets(np.array([[3, -100]]), 10)
      Traceback (most recent call last):
      ...
      smmd_jax.errors.TokenRangeError: target at row 0, column 1 is -100, outside [0, 10) (V = 10); 1 such target in \
the batch. Mask positions that are not to be learnt.
    """
    if isinstance(targets, jax.core.Tracer) or isinstance(mask, jax.core.Tracer):
        raise TypeError("check_targets looks at values, so it runs on the host: call it outside jit, on NumPy arrays.")
    array = as_integers("check_targets: targets", targets)
    check_targets_dtype("check_targets: targets", array)
    size = as_integer(vocab_size)
    if size is None or size < 1:
        raise ValueError(f"check_targets: vocab_size must be a positive integer, got {vocab_size!r}.")
    vocab_size = size
    bad = (array < 0) | (array >= vocab_size)
    if mask is not None:
        mask = as_host_array("check_targets: mask", mask)
        check_mask("check_targets", mask, array.shape)
        bad &= mask
    if not bad.any():
        return
    first = tuple(int(index) for index in np.argwhere(bad)[0])
    names = {0: "the scalar target", 1: "target at column {}"}
    place = names.get(array.ndim, "target at row {}, column {}").format(
        *(first if array.ndim < 2 else (first[0] if array.ndim == 2 else first[:-1], first[-1]))
    )
    many = int(bad.sum())
    raise TokenRangeError(
        f"{place} is {array[first]}, outside [0, {vocab_size}) (V = {vocab_size}); {many} such "
        f"target{'s' if many > 1 else ''} in the batch. Mask positions that are not to be learnt."
    )


def numeric_mask(
    targets: Int[Array, "*batch"], kernel: Vocabulary, *, mask: Bool[Array, "*batch"] | None = None
) -> Bool[Array, "*batch"]:
    """Say which positions have a numeric target: the positions over which the paper takes the mean.

        numeric = mask and (targets in kernel.token_ids)

    Args:
      targets: [...] token ids; masked ones may be anything.
      kernel: a `NumericKernel` or `NumericVocab`.
      mask: [...] bool; None takes every position.

    Returns:
      [...] bool.

    Example:
      >>> from smmd_jax.numeric_vocab import make_numeric_vocab
      >>> import jax.numpy as jnp
      >>> numeric_mask(jnp.array([5, 6, 0]), make_numeric_vocab({"7": 5, "8": 6}))
      Array([ True,  True, False], dtype=bool)
    """
    check_vocabulary("numeric_mask", kernel)
    targets = as_token_ids("numeric_mask: targets", targets)
    if mask is not None:
        mask = as_array("numeric_mask: mask", mask)
        check_mask("numeric_mask", mask, targets.shape)
    return match_targets(targets, kernel.token_ids, mask).any(-1)
