"""The decoder against an independent float64 one, and what padding, packing and dtypes must not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from smmd_jax import make_numeric_vocab
from smmd_jax.backbones import BACKBONES, PRESETS, SHARDING_RULES, Decoder, DecoderConfig
from tests.decoders import (
    EACH_FAMILY,
    FAMILIES,
    V,
    abstract_state,
    make_decoder,
    padded,
    reference_hidden,
    reference_logits,
    run,
    sequences,
)


def packed(rows, width):
    """All rows in one, then padding of segment 0."""
    ids, segments = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
    start = 0
    for segment, tokens in enumerate(rows, 1):
        ids[0, start : start + len(tokens)], segments[0, start : start + len(tokens)] = tokens, segment
        start += len(tokens)
    return {"input_ids": ids, "segment_ids": segments}


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_padded_and_packed_rows_equal_the_float64_reference_and_each_other(family):
    model, rows = make_decoder(family), sequences()
    left, right = run(model, **padded(rows, "left")), run(model, **padded(rows, "right", pad=5))
    together = run(model, **packed(rows, 24))[0]
    start = 0
    for row, tokens in enumerate(rows):
        length, wanted = len(tokens), reference_logits(model, tokens)
        found = left[row][-length:], right[row][:length], together[start : start + length]
        start += length
        # Relative to the largest logit: float32 sums of tens of terms, a few layers deep ...
        size = np.abs(wanted).max()
        np.testing.assert_allclose(found[0], wanted, atol=1e-5 * size, rtol=0)
        for other in found[1:]:  # ... and the same sums in another order.
            np.testing.assert_allclose(other, found[0], atol=1e-6 * size, rtol=0)


def test_long_rows_take_query_blocks_and_equal_the_reference():
    model = make_decoder("ministral")
    (tokens,) = sequences((128,))
    hidden = run(model, "hidden", input_ids=np.array([tokens], np.int32))[0]
    np.testing.assert_allclose(hidden, reference_hidden(model, tokens), atol=3e-5, rtol=1e-5)


def test_a_token_changes_nothing_before_it_and_nothing_in_other_segments():
    model, rows = make_decoder("llama3.1"), sequences((6, 6))
    batch = packed(rows, 12)
    before = run(model, **batch)[0]
    batch["input_ids"][0, 3] = (batch["input_ids"][0, 3] + 1) % V
    after = run(model, **batch)[0]
    changed = np.abs(after - before).max(-1) > 0
    assert changed.tolist() == [False] * 3 + [True] * 3 + [False] * 6


def test_given_positions_are_used_and_equal_the_default_where_they_agree():
    model, rows = make_decoder("ministral3"), sequences((9,))
    ids = np.array(rows, np.int32)
    plain = run(model, input_ids=ids)
    np.testing.assert_array_equal(run(model, input_ids=ids, positions=np.arange(9, dtype=np.int32)[None]), plain)
    assert np.abs(run(model, input_ids=ids, positions=np.arange(9, dtype=np.int32)[None] + 8) - plain).max() > 1e-3


def test_positions_that_the_model_does_not_have_are_refused_outside_jit():
    config = dataclasses.replace(FAMILIES["tiny"], max_positions=8)
    model = Decoder(config, rngs=nnx.Rngs(0))
    (tokens,) = sequences((9,))
    long, ids = np.array([tokens], np.int32), np.array([tokens[:8]], np.int32)
    with pytest.raises(ValueError, match="rows of 9 tokens exceed the model's 8 positions"):
        run(model, input_ids=long)  # the shape is known inside jit too
    for first, words in ((1, "position 8 and the model has positions 0 to 7"), (-1, "position -1 ")):
        positions = np.arange(first, first + 8)
        with pytest.raises(ValueError, match=words):
            model(ids, positions=positions[None].astype(np.int32))
    with pytest.raises(ValueError, match="position 8 "):
        model(long, attention_mask=np.ones_like(long))
    mask, segments = np.array([[0] + [1] * 8]), np.array([[1] * 4 + [2] * 5])
    beyond_in_the_padding = np.array([[99, *range(8)]], np.int32)
    logits = [
        model(long, attention_mask=mask),
        model(long, attention_mask=mask, positions=beyond_in_the_padding),
        model(long, segment_ids=segments),
        model(ids),
    ]
    assert all(np.isfinite(found[0, 1:]).all() for found in logits)


def test_rows_without_any_real_token_are_finite_in_value_and_gradient():
    graphdef, state = nnx.split(make_decoder("mistral"))
    batch = padded(sequences((5, 3)), "left", width=6)
    batch["attention_mask"][1] = 0

    def total(state):
        return jnp.square(nnx.merge(graphdef, state)(**batch)).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(state)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("bad", [V, -1])
def test_an_id_outside_the_vocabulary_makes_its_row_nan_and_is_nothing_in_the_padding(bad):
    model, rows = make_decoder("tiny"), sequences((6, 3))
    batch = padded(rows, "left")
    plain = run(model, **batch)
    batch["input_ids"][1, 0] = bad
    np.testing.assert_array_equal(run(model, **batch), plain)
    batch["input_ids"][1, -1] = bad
    logits = run(model, **batch)
    np.testing.assert_array_equal(logits[0], plain[0])
    assert np.isnan(logits[1, -1]).all()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_head_and_numeric_logits_are_columns_of_the_logits(family):
    model = make_decoder(family)
    vocab = make_numeric_vocab({str(digit): token_id for digit, token_id in enumerate((9, 3, 36, 20))}, policy="digits")
    ids = np.array(sequences((8,)), np.int32)
    hidden, logits = run(model, "hidden", input_ids=ids), run(model, input_ids=ids)
    assert model.head.shape == (24, V)
    np.testing.assert_allclose(hidden @ np.asarray(model.head), logits, atol=1e-5)
    numeric = run(model, "numeric_logits", hidden=hidden, kernel=vocab)
    np.testing.assert_allclose(numeric, logits[..., np.asarray(vocab.token_ids)], atol=1e-5)


def test_a_numeric_vocabulary_wider_than_the_head_is_refused():
    vocab = make_numeric_vocab({"0": 1, "1": V}, policy="digits")
    with pytest.raises(ValueError, match=f"token id {V}, the head has {V} columns"):
        make_decoder("tiny").numeric_logits(jnp.zeros((1, 24)), vocab)


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16_products_keep_float32_logits_near_those_of_float32(param_dtype):
    exact = make_decoder("gemma3_text")
    model = Decoder(exact.config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=param_dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(param_dtype)}
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(param_dtype), nnx.state(exact)))
    ids = np.array(sequences((12,)), np.int32)
    logits, wanted = run(model, input_ids=ids), run(exact, input_ids=ids)
    assert logits.dtype == np.float32
    assert model.head.dtype == run(model, "hidden", input_ids=ids).dtype == jnp.bfloat16
    # bfloat16 keeps 8 bits: 0.4 % of a logit, through three layers.
    assert np.sqrt(np.square(logits - wanted).mean()) < 0.02 * np.abs(wanted).max()


def test_dropout_needs_rngs_follows_the_key_and_keeps_no_state():
    graphdef, state = nnx.split(Decoder(dataclasses.replace(FAMILIES["tiny"], dropout=0.5), rngs=nnx.Rngs(0)))
    assert all(isinstance(variable, nnx.Param) for _, variable in nnx.to_flat_state(state))
    ids = np.array(sequences((10,)), np.int32)

    @jax.jit
    def dropped(seed):
        return nnx.merge(graphdef, state)(ids, rngs=nnx.Rngs(seed))

    plain = run(nnx.merge(graphdef, state), input_ids=ids)
    np.testing.assert_array_equal(plain, run(Decoder(FAMILIES["tiny"], rngs=nnx.Rngs(0)), input_ids=ids))
    first, again, other = (dropped(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - plain).max() > 0.01 and np.abs(first - other).max() > 0.01


def test_untrained_predictions_are_nearly_uniform():
    logits = run(Decoder(PRESETS["tiny"], rngs=nnx.Rngs(0)), input_ids=np.array(sequences((32,)), np.int32))
    entropy = jax.scipy.special.entr(jax.nn.softmax(logits)).sum(-1).mean()
    assert entropy > np.log(128) - 0.7


# Published sizes; smollm2-135m is the count of its own file.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "smollm3-3b": 3_075_098_624,
    "llama3-8b": 8_030_261_248,
    # of the model pages, noted from memory
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "llama-3.2-11b-vision": 10_670_220_835,
}


# Tracing a model of many layers takes as long as it is deep.
QUICK = ("tiny", "tiny-vlm", "smollm2-135m")


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in PRESETS]
)
def test_presets_have_the_published_number_of_parameters(preset):
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_state(PRESETS[preset])))
    if preset in PUBLISHED:
        assert count == PUBLISHED[preset]
    elif preset.startswith("tiny"):
        assert count < 2_000_000
    else:
        assert 3.2e9 < count < 3.6e9


def test_every_backbone_and_preset_has_its_port_and_sharding_table():
    assert set(BACKBONES) == set(SHARDING_RULES)
    assert {config.model_type for config in PRESETS.values()} <= set(BACKBONES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(hidden_size=30), "give head_dim"),
        (dict(num_kv_heads=3), "not a multiple of num_kv_heads 3"),
        (dict(head_dim=5), "wanted an even number"),
        (dict(num_layers=0), "num_layers is 0"),
        (dict(rope_layers=(True,)), "1 entries for 2 layers"),
        (dict(sliding_layers=(True, False)), "window is None"),
        (dict(window=0), "window is 0"),
        (dict(activation="relu"), "wanted one of silu, gelu, gelu_tanh"),
        (dict(dropout=1.0), "dropout is 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    plain = dict(vocab_size=8, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**plain | fields)


IDS = np.ones((2, 4), np.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(input_ids=IDS[0]), ValueError, r"input_ids is int32\[4\], wanted integers \[B, T\]"),
        (dict(input_ids=IDS * 1.0), ValueError, "wanted integers"),
        (dict(input_ids=IDS, attention_mask=IDS[:, :3]), ValueError, r"attention_mask has shape \[2, 3\]"),
        (dict(input_ids=IDS, segment_ids=IDS[:1]), ValueError, r"segment_ids has shape \[1, 4\]"),
        (dict(input_ids=IDS, positions=IDS[0]), ValueError, r"positions has shape \[4\]"),
        (dict(input_ids=IDS, attention_mask=IDS * -1e9), TypeError, "attention_mask is float"),
        (dict(input_ids=IDS, images={}), ValueError, "text backbone"),
    ],
)
def test_arrays_of_the_wrong_kind_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        make_decoder("tiny").hidden(**arguments)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_and_no_tokens_are_refused(shape):
    with pytest.raises(ValueError, match="wanted at least one row and one token"):
        make_decoder("qwen2").hidden(np.zeros(shape, np.int32))


def test_ids_beyond_32_bits_are_no_other_tokens():
    model = make_decoder("qwen2")
    assert np.isnan(model(np.array([[3, 2**32 + 3]]))[0, 1]).all()
    assert np.isfinite(model(np.array([[3, 4]], np.uint64))).all()


def test_an_unknown_rematerialisation_is_refused():
    for remat in ("half", ["full"], None):
        with pytest.raises(ValueError, match="is unknown, wanted one of none, full, dots"):
            Decoder(FAMILIES["tiny"], rngs=nnx.Rngs(0), remat=remat)
