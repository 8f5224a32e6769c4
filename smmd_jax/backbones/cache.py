"""Keys and values of the tokens so far, for generation with static shapes."""

from collections.abc import Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Hold one array of keys and one of values per layer, and which slots hold a real token.

    One array a layer, not one stacked array: inside a loop a stacked one is copied whole at every step. Layers that
    read images keep the keys and values of these, made once, or None where there are none.

    Args:
        keys, values: per layer float [B, G, S, C], S slots; of a layer that reads images [B, G, P, C], P patches.
        real: bool [B, S]; slots of padding and slots not yet written are False.
        used: int32 scalar, slots written so far, the same for every row.
        shift: int32 [B], position of the next token less the count of real tokens before it: 0 but where an image
            takes fewer positions than tokens.
        tiles: bool [B, M], which tiles of its images the tokens to come read (mllama).
    """

    keys: tuple[Float[Array, "B G _ C"] | None, ...]
    values: tuple[Float[Array, "B G _ C"] | None, ...]
    real: Bool[Array, "B S"]
    used: Int[Array, ""]
    shift: Int[Array, "B"]
    tiles: Bool[Array, "B M"] | None = None


def make_cache(
    layers: list[tuple[Float[Array, "B G T C"], Float[Array, "B G T C"]] | tuple[None, None]],
    real: Bool[Array, "B T"],
    slots: int,
    *,
    shift: Int[Array, "B"] | None = None,
    cross_layers: Collection[int] = (),
    tiles: Bool[Array, "B M"] | None = None,
) -> Cache:
    """Pad the keys and values of a prompt of T columns to `slots` slots; those of `cross_layers` stay as they are.

    Raises:
        ValueError: fewer slots than columns.
    """
    columns = real.shape[1]
    if slots < columns:
        raise ValueError(f"a cache of {slots} slots cannot hold {columns} columns: ask for at least {columns} slots")

    def pad(layer: int, heads: Array | None) -> Array | None:
        return heads if layer in cross_layers else jnp.pad(heads, ((0, 0), (0, 0), (0, slots - columns), (0, 0)))

    return Cache(
        keys=tuple(pad(layer, keys) for layer, (keys, _) in enumerate(layers)),
        values=tuple(pad(layer, values) for layer, (_, values) in enumerate(layers)),
        real=jnp.pad(real, ((0, 0), (0, slots - columns))),
        used=jnp.int32(columns),
        shift=jnp.zeros(real.shape[0], jnp.int32) if shift is None else shift,
        tiles=tiles,
    )
