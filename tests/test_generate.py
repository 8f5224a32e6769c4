"""Generation: the cached loop against repeated full forwards, for every family, side of padding and batch size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from smmd_jax.backbones import Decoder
from tests.decoders import EACH_FAMILY, FAMILIES, make_decoder, padded, reference_logits, run, sequences
from train import generate as generate_module
from train.generate import generate

NEW = 8
PROMPTS = sequences((9, 2, 6), seed=3)


def reference_tokens(model, prompt, count):
    """Append the most likely token of the float64 decoder, again and again; no cache."""
    tokens = list(prompt)
    for _ in range(count):
        scores = reference_logits(model, tokens)[-1]
        best = np.sort(scores)[-2:]
        assert best[1] - best[0] > 1e-4, "a tie: choose another seed, float32 may break it either way"
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_cached_tokens_equal_repeated_full_forwards_with_both_paddings(family):
    model = make_decoder(family)
    wanted = [reference_tokens(model, prompt, NEW) for prompt in PROMPTS]
    for side in ("left", "right"):
        tokens = generate(model, **padded(PROMPTS, side, width=10), max_new_tokens=NEW)
        assert tokens.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, wanted)


def test_tokens_do_not_depend_on_the_batch():
    model = make_decoder("gemma3_text")
    prompts = sequences((9, 2, 6, 1, 9, 4, 5, 3), seed=3)
    whole = np.asarray(generate(model, **padded(prompts, "left"), max_new_tokens=NEW))
    assert len({tuple(row) for row in whole}) > 1
    for size in (1, 3):
        for start in range(0, len(prompts) - size + 1, size):
            part = padded(prompts[start : start + size], "left", width=9)
            np.testing.assert_array_equal(generate(model, **part, max_new_tokens=NEW), whole[start : start + size])


def test_any_eos_ends_a_row_with_itself_and_then_pads():
    model = make_decoder("qwen2")
    batch = padded(PROMPTS, "left")
    free = np.asarray(generate(model, **batch, max_new_tokens=NEW))
    eos_ids = (int(free[0, 2]), int(free[1, 4]))
    wanted = free.copy()
    for row in wanted:
        ends = np.flatnonzero(np.isin(row, eos_ids))
        if ends.size:
            row[ends[0] + 1 :] = 36
    assert (wanted == 36).any() and not (wanted == 36).all(axis=1).any()
    np.testing.assert_array_equal(generate(model, **batch, max_new_tokens=NEW, eos_ids=eos_ids, pad_id=36), wanted)


def test_the_loop_stops_when_all_rows_are_done():
    model = make_decoder("tiny")
    batch = padded(PROMPTS, "left")
    first = np.asarray(generate(model, **batch, max_new_tokens=1))[:, 0]
    steps = []
    original = generate_module._is_eos

    def counting(token, eos_ids):
        jax.debug.callback(lambda: steps.append(1))
        return original(token, eos_ids)

    generate_module._is_eos = counting
    try:
        generate_module._generate.clear_cache()
        tokens = generate(model, **batch, max_new_tokens=NEW, eos_ids=tuple(first.tolist()))
        jax.effects_barrier()
    finally:
        generate_module._is_eos = original
        generate_module._generate.clear_cache()
    assert len(steps) == 1 and (np.asarray(tokens)[:, 1:] == 0).all()


def test_one_compilation_per_shape_whatever_the_weights_and_eos():
    generate_module._generate.clear_cache()
    batch = padded(PROMPTS, "left")
    for seed in (0, 1):
        model = Decoder(FAMILIES["tiny"], rngs=nnx.Rngs(seed))
        for eos in (1, 2):
            generate(model, **batch, max_new_tokens=2, eos_ids=(eos,))
    assert generate_module._generate._cache_size() == 1
    generate(model, **batch, max_new_tokens=3, eos_ids=(1,))
    assert generate_module._generate._cache_size() == 2


def test_extending_by_several_tokens_equals_one_pass():
    model = make_decoder("ministral")
    (tokens,) = sequences((12,))
    ids = np.array([tokens, tokens], np.int32)
    graphdef, state = nnx.split(model)

    @jax.jit
    def in_parts(state):
        model = nnx.merge(graphdef, state)
        start, cache = model.prefill(ids[:, :5], slots=14)
        middle, cache = model.extend(ids[:, 5:6], cache)
        end, cache = model.extend(ids[:, 6:], cache)
        return jnp.concatenate([start, middle, end], axis=1), cache.used

    hidden, used = in_parts(state)
    assert used == 12
    np.testing.assert_allclose(hidden, run(model, "hidden", input_ids=ids), atol=1e-5)


def test_a_cache_smaller_than_the_prompt_is_refused():
    with pytest.raises(ValueError, match="a cache of 3 slots cannot hold 4 columns"):
        jax.eval_shape(lambda ids: make_decoder("tiny").prefill(ids, slots=3), jnp.ones((1, 4), jnp.int32))


IDS = np.ones((2, 4), np.int32)
HALF = np.array([[1, 1, 1, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(input_ids=IDS[0], attention_mask=IDS[0]), ValueError, r"input_ids is int32\[4\]"),
        (dict(input_ids=IDS, attention_mask=IDS[:, :2]), ValueError, r"attention_mask has shape \[2, 2\]"),
        (dict(input_ids=IDS, attention_mask=IDS * 1.0), TypeError, "attention_mask is float64"),
        (dict(input_ids=IDS, attention_mask=HALF), ValueError, r"prompt rows \[1\] hold no real token"),
        (dict(max_new_tokens=0), ValueError, "max_new_tokens is 0"),
        (dict(max_new_tokens=125), ValueError, "exceed the model's 128 positions"),
        (dict(images={}), ValueError, "text backbone"),
        (dict(input_ids=IDS[:0], attention_mask=IDS[:0]), ValueError, "input_ids holds no row"),
        (dict(input_ids=IDS * 37), ValueError, r"token ids \[37\], and the model reads 0 to 36"),
        (dict(input_ids=IDS.astype(np.int64) + 2**32), ValueError, r"token ids \[4294967297\]"),
        (dict(input_ids=-IDS), ValueError, r"token ids \[-1\]"),
        (dict(max_new_tokens=2.5), ValueError, "max_new_tokens is 2.5, wanted at least 1, a whole number"),
        (dict(max_new_tokens="2"), ValueError, "max_new_tokens is '2'"),
        (dict(max_new_tokens=True), ValueError, "max_new_tokens is True"),
        (dict(eos_ids=(37,)), ValueError, "eos_ids holds 37, and the model writes tokens 0 to 36"),
        (dict(eos_ids=(1.5,)), ValueError, "eos_ids holds 1.5"),
        (dict(eos_ids=("5",)), ValueError, "eos_ids holds '5'"),
        (dict(pad_id=None), ValueError, "pad_id is None"),
        (dict(temperature="hot"), ValueError, "temperature is 'hot', wanted a finite number"),
        (dict(temperature=1.0, key=7), TypeError, "key is 7, wanted a key of jax.random"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(arguments, error, message):
    with pytest.raises(error, match=message):
        generate(make_decoder("tiny"), **dict(input_ids=IDS, attention_mask=IDS, max_new_tokens=2) | arguments)


@pytest.mark.slow
def test_a_temperature_draws_from_the_softmax():
    """First tokens of many equal rows follow softmax(logits / temperature): no token beyond five standard errors."""
    model, count = make_decoder("qwen2"), 4000
    prompts = {"input_ids": np.full((count, 2), 5), "attention_mask": np.ones((count, 2), int)}
    tokens = generate(model, **prompts, max_new_tokens=1, temperature=0.7, key=jax.random.key(0))
    found = np.bincount(np.asarray(tokens)[:, 0], minlength=model.config.vocab_size) / count
    wanted = jax.nn.softmax(model(prompts["input_ids"][:1])[0, -1] / 0.7)
    assert np.all(np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / count) + 1e-3)
    assert (found > 0).sum() > 3


@pytest.mark.slow
def test_draws_repeat_by_key_and_do_not_depend_on_later_rows():
    model = make_decoder("qwen2")
    draw = lambda rows, seed: np.asarray(
        generate(model, **padded(rows, "left", width=9), max_new_tokens=NEW, temperature=1.0, key=jax.random.key(seed))
    )
    whole = draw(PROMPTS, 3)
    np.testing.assert_array_equal(draw(PROMPTS, 3), whole)
    np.testing.assert_array_equal(draw(PROMPTS[:2], 3), whole[:2])
    assert (draw(PROMPTS, 4) != whole).any()
    cold = generate(
        model, **padded(PROMPTS, "left", width=9), max_new_tokens=NEW, temperature=1e-4, key=jax.random.key(0)
    )
    np.testing.assert_array_equal(cold, generate(model, **padded(PROMPTS, "left", width=9), max_new_tokens=NEW))


def test_with_a_key_for_each_row_a_draw_does_not_depend_on_its_place():
    model, keys = make_decoder("qwen2"), jax.random.split(jax.random.key(5), len(PROMPTS))
    draw = lambda rows, keys: np.asarray(
        generate(model, **padded(rows, "left", width=9), max_new_tokens=NEW, temperature=1.0, key=keys)
    )
    np.testing.assert_array_equal(draw(PROMPTS[::-1], keys[::-1])[::-1], draw(PROMPTS, keys))
    assert (draw(PROMPTS, keys[::-1]) != draw(PROMPTS, keys)).any()
    with pytest.raises(ValueError, match=r"got keys of shape \[2\] for"):
        draw(PROMPTS, keys[:2])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": -1.0, "key": 0}, "temperature is -1.0, wanted a finite number"),
        ({"temperature": float("nan"), "key": 0}, "temperature is nan, wanted"),
        ({"temperature": 0.5}, "no key was given"),
        ({"key": 0}, "draws nothing"),
    ],
)
def test_sampling_needs_both_or_neither(options, words):
    if "key" in options:
        options = {**options, "key": jax.random.key(options["key"])}
    with pytest.raises(ValueError, match=words):
        generate(make_decoder("qwen2"), **padded(PROMPTS, "left"), max_new_tokens=2, **options)
