"""The operands every loss shares: their checks, the match of targets with numeric tokens, the numeric columns.

Checks look at shapes and dtypes, never at values: they cost nothing under jit and need no device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.errors import TokenRangeError
from smmd_jax.kernels import NumericKernel
from smmd_jax.numeric_vocab import NumericVocab
from smmd_jax.scalars import as_real

Vocabulary = NumericKernel | NumericVocab


def check_targets_dtype(what: str, targets: Any) -> None:
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"{what} must be integer token ids, got dtype {targets.dtype}.")


def check_mask(where: str, mask: Any, shape: tuple[int, ...]) -> None:
    if mask.shape != shape:
        raise ValueError(f"{where}: mask has shape {mask.shape}, targets have shape {shape}; they must be the same.")
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{where}: mask must be boolean (true where it counts), got {mask.dtype}; pass mask != 0.")


def as_array(what: str, operand: Any) -> Array:
    """Convert an operand to an array of JAX; what is none is a TypeError that names it."""
    if isinstance(operand, jax.Array):
        return operand
    try:
        return jnp.asarray(as_host_array(what, operand))
    except jax.errors.TracerArrayConversionError:  # a list of traced values
        try:
            return jnp.asarray(operand)
        except (TypeError, ValueError):
            raise _ragged(what, operand) from None


def as_host_array(what: str, operand: Any) -> np.ndarray:
    """As `as_array`, to an array of NumPy: nothing is narrowed yet."""
    try:
        array = np.asarray(operand)
    except ValueError:
        raise _ragged(what, operand) from None
    if array.dtype.kind in "OUSTMm":
        shown = "None" if operand is None else f"a {type(operand).__name__} of dtype {array.dtype}"
        raise TypeError(f"{what} must be an array of numbers, got {shown}.")
    return array


def _ragged(what: str, operand: Any) -> TypeError:
    kind = type(operand).__name__
    return TypeError(f"{what} must be an array of numbers, got a {kind} whose rows differ in length.")


def as_integers(what: str, operand: Any) -> np.ndarray:
    """Convert integers to an array of NumPy, in their own width; an empty list, of no dtype yet, is one of integers."""
    array = as_host_array(what, operand)
    return array.astype(np.int32) if array.size == 0 and isinstance(operand, list | tuple) else array


def check_real(what: str, array: Array) -> None:
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{what} must be real numbers, got dtype {array.dtype}.")


def as_token_ids(what: str, targets: Any) -> Int[Array, "*batch"]:
    """Convert token ids to int32; what int32 cannot hold stays outside every vocabulary instead of wrapping into it.

    Narrow ids are widened: compared with the vocabulary's width in uint8, that width itself would wrap.
    """
    if not isinstance(targets, jax.Array):
        targets = as_integers(what, targets)
        if targets.dtype.kind in "iu" and targets.dtype.itemsize == 8:
            targets = np.clip(targets, -1, 2**31 - 1)
    check_targets_dtype(what, targets)
    return jnp.asarray(targets).astype(jnp.int32)


def check_positive(where: str, **numbers: float) -> None:
    """Refuse a parameter that float32 would hold as 0, infinity or NaN."""
    for name, given in numbers.items():
        number = as_real(given)
        if number is None or not 0 < np.float32(min(number, 1e39)) < np.inf:
            raise ValueError(f"{where}: {name} must be a positive finite float32 number, got {given!r}.")


def check_operands(
    name: str, scores: Any, targets: Any, mask: Any, *, what: str = "logits", last: str = "V"
) -> tuple[Float[Array, "*batch V"], Int[Array, "*batch"], Bool[Array, "*batch"] | None]:
    """Convert the operands of a loss to arrays and check that they fit one another."""
    scores, targets = as_array(f"{name}: {what}", scores), as_token_ids(f"{name}: targets", targets)
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(f"{name}: {what} must be floating point, got dtype {scores.dtype}.")
    if scores.ndim == 0 or scores.shape[:-1] != targets.shape:
        raise ValueError(
            f"{name}: {what} must be [..., {last}] and targets [...], got {scores.shape} and {targets.shape}; "
            "nothing is shifted here: shift_targets moves the targets by one."
        )
    if mask is not None:
        mask = as_array(f"{name}: mask", mask)
        check_mask(name, mask, targets.shape)
    return scores, targets, mask


def check_vocabulary(name: str, kernel: Any, wanted: type | tuple[type, ...] = (NumericKernel, NumericVocab)) -> None:
    if isinstance(kernel, wanted):
        return
    if isinstance(kernel, NumericVocab):
        raise TypeError(f"{name}: needs a NumericKernel, got a NumericVocab; pass make_numeric_kernel(vocab).")
    raise TypeError(f"{name}: kernel must be a NumericKernel or NumericVocab, got {type(kernel).__name__}.")


def check_head_width(name: str, kernel: Vocabulary, width: int) -> None:
    """Refuse a head that is narrower than the largest numeric id: JAX would clamp the index and read another token."""
    needed = kernel.vocab.min_vocab_size
    if needed > width:
        raise TokenRangeError(
            f"{name}: numeric token id {needed - 1} lies outside a vocabulary of width {width}; "
            "the numeric vocabulary and the model's head belong to different tokenizers."
        )


def check_head(name: str, hidden: Any, head: Any, kernel: Vocabulary) -> Float[Array, "D V"]:
    """Check a head of shape [D, V] against hidden states [..., D]."""
    head = as_array(f"{name}: head", head)
    if not jnp.issubdtype(head.dtype, jnp.floating):
        raise TypeError(f"{name}: head must be floating point, got dtype {head.dtype}.")
    depth = hidden.shape[-1]
    if head.ndim != 2 or head.shape[0] != depth:
        turned = head.ndim == 2 and head.shape[1] == depth
        advice = "this head is [V, D]: pass head.T." if turned else "head must be [D, V] with the D of hidden [..., D]."
        raise ValueError(f"{name}: hidden is {hidden.shape} and head is {head.shape}; {advice}")
    check_head_width(name, kernel, head.shape[1])
    return head


def match_targets(
    targets: Int[Array, "*batch"], token_ids: Int[Array, "N"], mask: Bool[Array, "*batch"] | None
) -> Bool[Array, "*batch N"]:
    """Compare each target with each numeric id: one-hot rows, all false where the target is no number or is masked.

    A comparison, not an index: an ignore label such as -100 matches nothing and can never read another token's row.
    """
    match = targets[..., None] == token_ids
    return match if mask is None else match & mask[..., None]


def numeric_columns(
    name: str, logits: Float[Array, "*batch V"], kernel: Vocabulary
) -> Float[Array, "*batch N"]:
    """Take the columns of the numeric tokens, in the logits' own dtype."""
    check_head_width(name, kernel, logits.shape[-1])
    return logits.at[..., kernel.token_ids].get(mode="promise_in_bounds", unique_indices=True)


def live_rows(
    scores: Float[Array, "*batch K"], live: Bool[Array, "*batch"]
) -> Float[Array, "*batch K"]:
    """Put zeros into the rows that do not count, before any arithmetic: NaN times 0 is NaN, in the gradient too."""
    return jnp.where(live[..., None], scores, jnp.zeros((), scores.dtype))


def numeric_operands(
    name: str, logits: Any, targets: Any, kernel: Vocabulary, mask: Any
) -> tuple[Float[Array, "*batch N"], Bool[Array, "*batch N"]]:
    """Check logits and targets; return the float32 numeric columns, zeros in dead rows, and the targets' match."""
    check_vocabulary(name, kernel)
    logits, targets, mask = check_operands(name, logits, targets, mask)
    match = match_targets(targets, kernel.token_ids, mask)
    columns = live_rows(numeric_columns(name, logits, kernel), match.any(-1))
    return columns.astype(jnp.float32), match


def full_operands(
    name: str, logits: Any, targets: Any, kernel: Vocabulary, mask: Any
) -> tuple[Float[Array, "*batch V"], Bool[Array, "*batch N"]]:
    """As `numeric_operands`, with the whole vocabulary: for losses that take the softmax over all tokens."""
    check_vocabulary(name, kernel)
    logits, targets, mask = check_operands(name, logits, targets, mask)
    check_head_width(name, kernel, logits.shape[-1])
    match = match_targets(targets, kernel.token_ids, mask)
    return live_rows(logits, match.any(-1)).astype(jnp.float32), match


def value_differences(match: Bool[Array, "*batch N"], kernel: Vocabulary) -> Float[Array, "*batch N"]:
    """v_j - y for each numeric token and the target's value y (0 where the target is no number); a constant."""
    values = lax.stop_gradient(kernel.values)
    target = jnp.sum(jnp.where(match, values, 0.0), axis=-1, keepdims=True)
    return values - target


def absolute(values: Array) -> Array:
    """|values| with slope 0 at 0, where jnp.abs has slope 1: what is exactly right must not be pushed away."""
    return lax.stop_gradient(jnp.sign(values)) * values


def at_numeric(values: Float[Array, "*batch"], match: Bool[Array, "*batch N"]) -> Float[Array, "*batch"]:
    """Keep a loss at numeric targets; exactly 0 elsewhere."""
    return jnp.where(match.any(-1), values, 0.0)


def zeros_varying_like(shape: tuple[int, ...], *operands: Array) -> Float[Array, "..."]:
    """Float32 zeros that vary over the mesh axes of all operands, as what is computed from them does.

    `shard_map` compares the two at the edges of a loop. The operands are named, never read: select drops even NaN.
    """
    zero = jnp.zeros((), jnp.float32)
    for operand in operands:
        corner = operand[(slice(0, 1),) * operand.ndim]
        zero = jnp.where(False, jnp.sum(corner).astype(jnp.float32), zero)
    return jnp.broadcast_to(zero, shape)

def summed_like(operand, cotangent):
    """Sum a cotangent over the mesh axes of `shard_map` over which its operand is one and the same; round it last."""
    _, sum_over_axes = jax.vjp(lambda operand: operand.astype(jnp.float32) + cotangent, operand)
    return sum_over_axes(cotangent)[0]
