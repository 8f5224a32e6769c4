"""What the vision towers share: their sizes, the rotation by row and column, and attention within an image."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from smmd_jax.backbones.attention import attend
from smmd_jax.backbones.rope import rotate


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Describe a vision tower.

    Args:
        hidden_size, intermediate_size, num_layers, num_heads: of its layers.
        patch_size: pixels along one side of a patch.
        merge_size: patches along one side of a block that becomes one feature.
        temporal_size: equal frames that a patch is made of (qwen2_5_vl repeats an image).
        channels: of the pixels.
        window_size: pixels along one side of an attention window; None: every layer sees the whole image.
        full_layers: layers that see the whole image all the same.
        rope_theta, norm_eps, norm_plus_one, activation, mlp_bias: as in DecoderConfig.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge_size: int = 2
    temporal_size: int = 1
    channels: int = 3
    window_size: int | None = None
    full_layers: tuple[int, ...] = ()
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    activation: str = "silu"
    mlp_bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_numbers(self) -> int:
        """How many numbers a patch has."""
        return self.channels * self.temporal_size * self.patch_size**2

    @property
    def window_blocks(self) -> int | None:
        """Blocks along one side of a window."""
        return None if self.window_size is None else self.window_size // self.patch_size // self.merge_size


def grid_rotation(
    rows: Int[Array, "I L"], columns: Int[Array, "I L"], row_frequencies: np.ndarray, column_frequencies: np.ndarray
) -> tuple[Float[Array, "I L half"], Float[Array, "I L half"]]:
    """Return cos and sin [I, L, C / 2]: the first half of the pairs turns by the row, the second by the column."""
    by = lambda places, frequencies: places[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([by(rows, row_frequencies), by(columns, column_frequencies)], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def attend_within(
    queries: Float[Array, "I L D"],
    keys: Float[Array, "I L D"],
    values: Float[Array, "I L D"],
    rotation: tuple[Array, Array],
    visible: Bool[Array, "I L L"],
    heads: int,
) -> Float[Array, "I L D"]:
    """Attend over the visible patches of the same image, after turning queries and keys by their places."""
    split = lambda array: array.reshape(*array.shape[:2], heads, -1)
    queries, keys, values = split(queries), split(keys), split(values)
    queries = queries.astype(jnp.float32) * queries.shape[-1] ** -0.5
    queries, keys = rotate(queries, *rotation).astype(values.dtype), rotate(keys, *rotation)
    by_head = lambda array: jnp.swapaxes(array, 1, 2)
    mean = attend(by_head(queries)[:, :, None], by_head(keys), by_head(values), visible)[:, :, 0]
    return by_head(mean).reshape(*mean.shape[:1], mean.shape[2], -1)


def run_tower_layer(layer: nnx.Module, states: Array, table: tuple, key: None) -> Array:
    """Run one layer of a tower for `run_unrolled`; the table holds what it takes beside the states."""
    del key  # of dropout, which towers do not have
    return layer(states, *table)


def linear(inputs: int, outputs: int, bias: bool, *, rngs: nnx.Rngs, dtype, param_dtype) -> nnx.Linear:
    """A matrix that keeps the variance of what it multiplies."""
    return nnx.Linear(
        inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs,
        kernel_init=nnx.initializers.normal(inputs**-0.5),
    )  # fmt: skip
