"""Keys and values of the tokens so far, for generation with static shapes."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Hold one array of keys and one of values per layer, and which slots hold a real token.

    One array a layer, not one stacked array: inside a loop a stacked one is copied whole at every step.

    Args:
        keys, values: per layer float [B, G, S, C], S slots.
        real: bool [B, S]; slots of padding and slots not yet written are False.
        used: int32 scalar, slots written so far, the same for every row.
        shift: int32 [B], position of the next token less the count of real tokens before it: 0 but where an image
            takes fewer positions than tokens.
    """

    keys: tuple[Float[Array, "B G S C"], ...]
    values: tuple[Float[Array, "B G S C"], ...]
    real: Bool[Array, "B S"]
    used: Int[Array, ""]
    shift: Int[Array, "B"]


def make_cache(
    layers: list[tuple[Float[Array, "B G T C"], Float[Array, "B G T C"]]],
    real: Bool[Array, "B T"],
    slots: int,
    *,
    shift: Int[Array, "B"] | None = None,
) -> Cache:
    """Pad the keys and values of a prompt of T columns to `slots` slots.

    Raises:
        ValueError: fewer slots than columns.
    """
    columns = real.shape[1]
    if slots < columns:
        raise ValueError(f"a cache of {slots} slots cannot hold {columns} columns: ask for at least {columns} slots")

    def pad(heads: Array) -> Array:
        return jnp.pad(heads, ((0, 0), (0, 0), (0, slots - columns), (0, 0)))

    return Cache(
        keys=tuple(pad(keys) for keys, _ in layers),
        values=tuple(pad(values) for _, values in layers),
        real=jnp.pad(real, ((0, 0), (0, slots - columns))),
        used=jnp.int32(columns),
        shift=jnp.zeros(real.shape[0], jnp.int32) if shift is None else shift,
    )
