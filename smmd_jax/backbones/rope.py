"""Rotary position embeddings: frequencies of each kind, angles and the rotation, all in float32."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Describe one rotary embedding; fields that a kind does not use are ignored by it.

    Args:
        theta: base of the frequencies theta ** (-2i / head_dim).
        kind: "default"; "linear" (all frequencies / factor); "llama3" (long wavelengths / factor, short ones kept, a
            blend between); "yarn" (a ramp over the dimensions, and cos and sin scaled by `attention_factor`).
        factor: how many times longer the context became.
        original_max_positions: context before the scaling (llama3, yarn).
        low_freq_factor, high_freq_factor: ends of llama3's blend, in turns over the original context.
        beta_fast, beta_slow: ends of yarn's ramp, in turns over the original context.
        truncate: round the ends of yarn's ramp to whole dimensions.
        mscale, mscale_all_dim: yarn's attention factor is the ratio of 0.1 m ln(factor) + 1 of the two where both are
            set, else 0.1 ln(factor) + 1.
        attention_factor: yarn's factor on cos and sin, instead of the one computed.
        sections: how many pairs turn by the time, row and column of a token (qwen2_5_vl); None: all by one position.

    Raises:
        ValueError: an unknown kind, sections that are not three counts, a scaled kind whose original length is
            missing, or numbers that make no frequencies; the message names the field.

    References:
        J. Su et al., RoFormer, 2021, eq. 15; B. Peng et al., YaRN, 2023, section 3; A. Dubey et al., The Llama 3 Herd
        of Models, 2024, section 3.2.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    sections: tuple[int, int, int] | None = None

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind {self.kind!r} is unknown, wanted one of {', '.join(ROPE_KINDS)}")
        if self.kind in ("llama3", "yarn") and self.original_max_positions is None:
            raise ValueError(f"rope kind {self.kind!r} needs original_max_positions, the context before the scaling")
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"rope factor is {self.factor}, wanted a finite number of at least 1")
        if not 1.0 < self.theta < math.inf:
            raise ValueError(f"rope theta is {self.theta}, wanted a finite number above 1: it is the base of powers")
        if self.original_max_positions is not None and self.original_max_positions < 1:
            raise ValueError(f"rope original_max_positions is {self.original_max_positions}, wanted at least 1")
        if self.kind == "llama3" and not 0.0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"rope low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}: wanted "
                "the first above 0 and below the second"
            )
        if self.kind == "yarn" and not 0.0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError(
                f"rope beta_slow is {self.beta_slow} and beta_fast {self.beta_fast}: wanted the first above 0 and not "
                "above the second"
            )
        if self.sections is not None and (len(self.sections) != 3 or min(self.sections) < 0):
            raise ValueError(f"rope sections are {self.sections}, wanted three counts of pairs: time, row, column")


def _default_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    # float32 powers, as the reference implementations take them: at position 10,000 one unit in the last place shows.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.power(np.float32(config.theta), exponents)


def _linear_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    return _default_frequencies(config, head_dim) / np.float32(config.factor)


def _llama3_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    frequencies = _default_frequencies(config, head_dim)
    turns = config.original_max_positions * frequencies / (2.0 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep = np.clip((turns - config.low_freq_factor) / span, 0.0, 1.0)
    return (keep * frequencies + (1.0 - keep) * frequencies / config.factor).astype(np.float32)


def _yarn_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    def dimension_of(turns: float) -> float:
        wavelength = config.original_max_positions / (turns * 2.0 * math.pi)
        return head_dim * math.log(wavelength) / (2.0 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero; the reference uses this width
    frequencies = _default_frequencies(config, head_dim)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return ((1.0 - ramp) * frequencies + ramp * frequencies / config.factor).astype(np.float32)


ROPE_KINDS = {
    "default": _default_frequencies,
    "linear": _linear_frequencies,
    "llama3": _llama3_frequencies,
    "yarn": _yarn_frequencies,
}


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the angle per position of each pair of dimensions, float32 [C / 2]."""
    return ROPE_KINDS[config.kind](config, head_dim)


def rope_magnitude(config: RopeConfig) -> float:
    """Return the factor on cos and sin: 1 except for yarn."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def check_positions(
    positions: Int[ArrayLike, "*axes B T"], real: Bool[ArrayLike, "#B T"], max_positions: int
) -> None:
    """Refuse a position of a real token that the model does not have; inside jit, where values are not known, pass.

    Raises:
        ValueError: a position below 0 or not below `max_positions`; the message says which.
    """
    arrays = (positions, real)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return
    if not all(getattr(array, "is_fully_addressable", True) for array in arrays):
        return
    found = np.where(np.asarray(real), np.asarray(positions), 0)
    if found.size and not (found.min() >= 0 and found.max() < max_positions):
        worst = found.max() if found.max() >= max_positions else found.min()
        raise ValueError(
            f"a token has position {worst} and the model has positions 0 to {max_positions - 1}: shorten the rows, or "
            "start the positions of each example at 0"
        )


def rope_rotation(
    config: RopeConfig, head_dim: int, positions: Int[Array, "B T"] | Int[Array, "3 B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Return cos and sin of position x frequency, float32 [B, T, C / 2] each, times the kind's magnitude.

    Positions [3, B, T] are time, row and column; each turns the pairs of its section.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config, head_dim)
    if positions.ndim == 3:
        starts = np.cumsum((0, *config.sections))
        angles = jnp.concatenate([angles[i, ..., starts[i] : starts[i + 1]] for i in range(3)], axis=-1)
    magnitude = rope_magnitude(config)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def rotate(
    heads: Float[Array, "B T H C"], cosine: Float[Array, "B T half"], sine: Float[Array, "B T half"]
) -> Float[Array, "B T H C"]:
    """Turn dimension i with dimension i + C / 2 (the half-split layout of Hugging Face) and keep the dtype.

    out[i] = x[i] cos_i - x[i + C/2] sin_i     out[i + C/2] = x[i + C/2] cos_i + x[i] sin_i
    """
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(heads.dtype)
