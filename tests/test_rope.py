"""Rotary embeddings: each kind against a one-by-one float64 form, the rotation by hand, its relative property."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax.backbones.rope import ROPE_KINDS, RopeConfig, rope_frequencies, rope_magnitude, rope_rotation, rotate
from tests.decoders import reference_frequencies

CASES = [
    RopeConfig(theta=1e4),
    RopeConfig(theta=1e8),
    RopeConfig(theta=1e6, kind="linear", factor=8.0),
    RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192),
    RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_max_positions=64, high_freq_factor=8.0),
    RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_positions=32768),
    RopeConfig(theta=1e6, kind="yarn", factor=16.0, original_max_positions=16384, mscale=1.0, mscale_all_dim=1.0),
]


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("rope", CASES, ids=lambda rope: f"{rope.kind}-{rope.factor:g}")
def test_frequencies_and_magnitude_equal_the_one_by_one_form(rope, head_dim):
    frequencies, magnitude = reference_frequencies(rope, head_dim)
    assert rope_frequencies(rope, head_dim).dtype == np.float32
    np.testing.assert_allclose(rope_frequencies(rope, head_dim), frequencies, rtol=1e-6)
    assert rope_magnitude(rope) == pytest.approx(magnitude, rel=1e-12)


def test_every_kind_is_covered():
    assert {rope.kind for rope in CASES} == set(ROPE_KINDS)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones():
    plain = rope_frequencies(RopeConfig(theta=5e5), 128)
    scaled = rope_frequencies(CASES[3], 128)
    wavelengths = 2 * math.pi / plain
    np.testing.assert_array_equal(scaled[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    np.testing.assert_array_equal(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8)
    assert ((wavelengths > 8192 / 4) & (wavelengths < 8192)).any()


def test_yarn_rounds_its_ramp_unless_told_otherwise_and_takes_a_given_magnitude():
    rounded = RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=64)
    exact = RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=64, truncate=False)
    assert np.abs(rope_frequencies(rounded, 32) / rope_frequencies(exact, 32) - 1).max() > 1e-3
    given = RopeConfig(kind="yarn", factor=4.0, original_max_positions=64, attention_factor=1.5)
    assert rope_magnitude(given) == 1.5
    assert rope_magnitude(rounded) == pytest.approx(0.1 * math.log(4) + 1)


def test_quarter_turn_by_hand():
    heads = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    zero, one = jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2))
    np.testing.assert_array_equal(rotate(heads, zero, one).ravel(), [-3.0, -4.0, 1.0, 2.0])
    np.testing.assert_array_equal(rotate(heads, one, zero), heads)


def test_products_depend_on_the_distance_only():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def product(query_position, key_position):
        turned = [
            rotate(heads, *rope_rotation(RopeConfig(), 16, jnp.array([[position]])))
            for heads, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert abs(product(7, 3) - product(8, 3)) > 1e-3


def test_bfloat16_heads_are_rotated_in_float32():
    heads = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 2, 16)), jnp.bfloat16)
    rotation = rope_rotation(RopeConfig(), 16, jnp.array([[3001]]))
    exact = rotate(heads.astype(jnp.float32), *rotation)
    assert rotate(heads, *rotation).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotate(heads, *rotation), exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(kind="ntk"), "wanted one of default, linear, llama3, yarn"),
        (dict(kind="yarn", factor=4.0), "needs original_max_positions"),
        (dict(kind="linear", factor=0.5), "rope factor is 0.5"),
    ],
)
def test_incomplete_kinds_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**fields)
