"""Llama 3.2 Vision without transformers: what is skipped, what is hidden, what is cached, what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from smmd_jax import check_targets, cross_entropy_loss
from smmd_jax.backbones import Decoder, VisionLanguageConfig, add_lora, load_pretrained, save_pretrained
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.mllama import Mllama
from smmd_jax.backbones.mllama_vision import MllamaVisionConfig, MllamaVisionLayer
from smmd_jax.backbones.ports import model_config
from smmd_jax.backbones.sharding import parameter_path
from smmd_jax.backbones.tensor_names import source_of
from smmd_jax.errors import CheckpointError
from train.generate import generate

V = 31
IMAGE = V
TEXT = DecoderConfig(
    model_type="mllama_text_model", vocab_size=V, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4,
    num_kv_heads=2, tied=False, cross_layers=(1,), extra_embeddings=8,
)  # fmt: skip
VISION = MllamaVisionConfig(
    hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, patch_size=2, image_size=4, max_tiles=4,
    aspect_ratios=8, num_global_layers=1, feature_layers=(0, 1),
)  # fmt: skip
CONFIG = VisionLanguageConfig(model_type="mllama", text=TEXT, vision=VISION, image_token_id=IMAGE)


@functools.cache
def make_model(dtype="float32"):
    """A model whose gates are open: at 0 a missing branch would not show."""
    model = Mllama(CONFIG, rngs=nnx.Rngs(0), dtype=dtype)
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: leaf + np.float32(0.3) * rng.standard_normal(leaf.shape, np.float32), state)
    return nnx.merge(graphdef, state)


def make_inputs(side="left"):
    """Two rows of text with one image and with two; what comes before an image does not see it."""
    rng = np.random.default_rng(1)
    rows = [[3, 4, IMAGE, 5, 6], [IMAGE, 7, 8, IMAGE, 9, 2, 1]]
    ids, mask = np.zeros((2, 7), np.int32), np.zeros((2, 7), np.int32)
    images = {
        "pixel_values": rng.standard_normal((2, 2, 4, 3, 4, 4)).astype(np.float32),
        "aspect_ratio_ids": np.array([[3, 0], [6, 1]]),
        "aspect_ratio_mask": np.array([[[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]]]),
        "cross_attention_mask": np.zeros((2, 7, 2, 4), np.int32),
    }
    reads = images["cross_attention_mask"]
    for row, tokens in enumerate(rows):
        columns = np.arange(7)[7 - len(tokens) :] if side == "left" else np.arange(len(tokens))
        ids[row, columns], mask[row, columns] = tokens, 1
        starts = columns[np.array(tokens) == IMAGE]
        for number, start in enumerate(starts):
            end = starts[number + 1] if number + 1 < len(starts) else columns[-1] + 1
            reads[row, start:end, number] = images["aspect_ratio_mask"][row, number]
    return ids, mask, images


@pytest.mark.slow
def test_left_and_right_padding_give_the_same():
    model = make_model()
    logits = []
    for side in ("left", "right"):
        ids, mask, images = make_inputs(side)
        logits.append(np.asarray(model(ids, attention_mask=mask, images=images))[mask == 1])
    np.testing.assert_allclose(*logits, atol=2e-6, rtol=0)
    tokens = [
        generate(model, ids, attention_mask=mask, images=images, max_new_tokens=5)
        for ids, mask, images in map(make_inputs, ("left", "right"))
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
def test_the_cache_continues_what_one_pass_computes():
    model = make_model()
    ids, mask, images = make_inputs()
    ids, tiled, _ = model.prepare(ids, mask, images)
    whole = model.hidden(ids, attention_mask=mask, images=tiled)
    start = 5
    first = dataclasses.replace(tiled, cross_attention_mask=tiled.cross_attention_mask[:, :start])
    hidden, cache = model.prefill(ids[:, :start], attention_mask=mask[:, :start], images=first, slots=9)
    patches = 2 * VISION.max_tiles * VISION.tile_patches
    assert [keys.shape[2] for keys in cache.keys] == [9, patches, 9]
    np.testing.assert_allclose(hidden[0, 2:], whole[0, 2:start], atol=1e-6)
    # Tokens that follow read the tiles that the last one read.
    np.testing.assert_array_equal(cache.tiles, tiled.cross_attention_mask[:, start - 1].reshape(2, -1))
    more, grown = model.extend(ids[:, start:], cache)
    np.testing.assert_allclose(more, whole[:, start:], atol=2e-6)
    assert grown.keys[1] is cache.keys[1], "the keys of the images are made once"


@pytest.mark.slow
def test_without_images_the_layers_that_read_them_are_skipped():
    model = make_model()
    ids = np.array([[1, 2, 3, 4]])
    graphdef, state = nnx.split(model)
    other = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 5.0 if "cross" in str(path) or "vision_model" in str(path) else leaf, state
    )
    layer = other["language_model"]["layers"][1]
    layer["mlp"]["up_proj"]["kernel"] = layer["mlp"]["up_proj"]["kernel"] * 3.0
    np.testing.assert_array_equal(model(ids), nnx.merge(graphdef, other)(ids))
    hidden, cache = model.prefill(jnp.asarray(ids), slots=6)
    assert cache.tiles is None and cache.keys[1] is None
    more, _ = model.extend(jnp.array([[5, 6]]), cache)
    wanted = model.hidden(np.array([[1, 2, 3, 4, 5, 6]]))
    np.testing.assert_allclose(np.concatenate([hidden, more], axis=1), wanted, atol=2e-6)


def test_a_token_that_sees_no_tile_attends_to_all_and_has_no_feed_forward():
    model = make_model()
    layer = model.language_model.layers[1]
    ids, mask, images = make_inputs("right")
    _, tiled, _ = model.prepare(ids, mask, images)
    states = model._with_images(jnp.asarray(ids), mask, tiled)["states"]
    flat = jax.random.normal(jax.random.key(0), (14, 16))
    out = layer(flat, states, batch=2)[0].reshape(2, 7, 16)
    blind = 0, 0  # the first token of row 0 comes before its image
    everything = dataclasses.replace(states, tiles=jnp.ones_like(states.tiles))
    mixed = layer.cross_attn(layer.input_layernorm(flat), everything)[0].reshape(2, 7, 16)
    gate = jnp.tanh(layer.cross_attn_attn_gate[...])
    np.testing.assert_allclose(out[blind], (flat.reshape(2, 7, 16) + gate * mixed)[blind], atol=1e-6)
    assert np.abs(layer(flat, everything, batch=2)[0].reshape(2, 7, 16)[blind] - out[blind]).max() > 1e-3


def test_patches_attend_to_tiles_that_are_not_there_and_these_only_to_what_is():
    tower = make_model().vision_model
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((1, 4, 3, 4, 4)).astype(np.float32)
    ids, there = jnp.array([3]), jnp.array([[True, True, True, False]])
    other = pixels.copy()
    other[0, 3] += 1.0
    first, second = tower(pixels, ids, there), tower(other, ids, there)
    assert np.abs(first - second)[0, :3].max() > 1e-4
    layer = tower.transformer.layers[0]
    states = jax.random.normal(jax.random.key(1), (1, 6, 8))
    real = jnp.array([[True, True, True, True, False, False]])
    moved = states.at[0, 5].add(1.0)
    change = np.abs(layer(states, real, tiles=2) - layer(moved, real, tiles=2))[0].max(-1)
    assert (change[:4] > 0).all() and change[4] == 0 and change[5] > 0


def test_scores_are_those_of_one_tile_at_a_time():
    """Memory of one released layer and its gradient, compiled and never run: 2.6 GB for all scores at once."""
    config = MllamaVisionConfig(
        hidden_size=1280, intermediate_size=5120, num_layers=1, num_heads=16, patch_size=14, image_size=560,
        max_tiles=4, aspect_ratios=8, num_global_layers=0, feature_layers=(),
    )  # fmt: skip
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MllamaVisionLayer(
        config, gated=False, rngs=nnx.Rngs(0), dtype=jnp.float32, param_dtype=jnp.float32)))  # fmt: skip

    @jax.jit
    @jax.grad
    def gradient(state, inputs, real):
        return nnx.merge(graphdef, state)(inputs, real, tiles=4).sum()

    length = 4 * 1608
    shapes = jax.ShapeDtypeStruct((1, length, 1280), jnp.float32), jax.ShapeDtypeStruct((1, length), bool)
    memory = gradient.lower(state, *shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3.5e9 < 2 * 16 * 4 * length**2


def test_the_image_token_is_read_and_never_predicted():
    model = make_model()
    ids, mask, images = make_inputs("right")
    logits = model(ids, attention_mask=mask, images=images)
    assert logits.shape[-1] == V and np.isfinite(np.asarray(logits)[mask == 1]).all()
    targets = jnp.asarray(ids)
    assert np.isnan(cross_entropy_loss(logits, targets)[0, 2])
    assert np.isfinite(cross_entropy_loss(logits, targets, mask=targets != IMAGE)).all()
    with pytest.raises(ValueError, match=str(IMAGE)):
        check_targets(ids, V)


@pytest.mark.slow
def test_narrow_products_stay_close():
    ids, mask, images = make_inputs()
    wide = np.asarray(make_model()(ids, attention_mask=mask, images=images))[mask == 1]
    narrow = np.asarray(make_model("bfloat16")(ids, attention_mask=mask, images=images))[mask == 1]
    assert narrow.dtype == np.float32 and np.abs(wide - narrow).max() < 0.1 * np.abs(wide).max()


def test_adapters_stand_beside_the_matrices_that_read_images():
    model = Mllama(CONFIG, rngs=nnx.Rngs(0))
    ids, mask, images = make_inputs()
    before = model(ids, attention_mask=mask, images=images)
    add_lora(model.language_model, rank=2, rngs=nnx.Rngs(1))
    assert model.language_model.layers[1].cross_attn.k_proj.lora_a.shape == (16, 2)
    np.testing.assert_allclose(model(ids, attention_mask=mask, images=images), before, atol=1e-6)


def drop(name):
    return lambda images: images.pop(name)


def change(name, index, value):
    def apply(images):
        images[name] = images[name].copy()
        images[name][index] = value

    return apply


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop("cross_attention_mask"), "wanted pixel_values, aspect_ratio_ids, aspect_ratio_mask, cross_att"),
        (change("aspect_ratio_ids", (1, 1), 0), "row 1 holds 2 image tokens .id 31. and 1 images"),
        (change("aspect_ratio_ids", (0, 0), 9), "go from 0 to 9, wanted 0 .no image. to 8"),
        (lambda images: images.update(pixel_values=images["pixel_values"][:, :1]), r"pixel_values has shape \[2, 1"),
        (lambda images: images.update(aspect_ratio_ids=np.array([1, 1])), r"wanted \[B, images\]"),
    ],
)
def test_images_that_do_not_fit_are_refused(fault, message):
    ids, mask, images = make_inputs()
    fault(images)
    with pytest.raises(ValueError, match=message):
        make_model()(ids, attention_mask=mask, images=images)


def test_image_tokens_in_the_padding_do_not_count():
    ids, mask, images = make_inputs()
    ids[0, 0] = IMAGE
    assert np.isfinite(make_model()(ids, attention_mask=mask, images=images)[mask == 1]).all()


def test_what_the_family_does_not_have_is_refused():
    with pytest.raises(ValueError, match="layers of two kinds"):
        Decoder(TEXT, rngs=nnx.Rngs(0), scan_layers=True)
    with pytest.raises(ValueError, match=r"cross_layers are .3,., wanted numbers from 0 to 2"):
        dataclasses.replace(TEXT, cross_layers=(3,))
    with pytest.raises(ValueError, match="extra_embeddings is 8 and tied is True"):
        dataclasses.replace(TEXT, tied=True)
    with pytest.raises(ValueError, match="the embedding has 39 tokens"):
        dataclasses.replace(CONFIG, image_token_id=39)
    with pytest.raises(ValueError, match=r"feature_layers are .2,., wanted 0 to 1"):
        dataclasses.replace(VISION, feature_layers=(2,))
    with pytest.raises(ValueError, match="wanted a multiple of patch_size 2"):
        dataclasses.replace(VISION, image_size=5)


@pytest.mark.parametrize(
    ("prefix", "outer"), [("language_model.model.", ""), ("model.language_model.", "model.")], ids=["file", "memory"]
)
def test_files_of_either_prefix_load_and_come_back(tmp_path, prefix, outer):
    model = make_model()
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    tensors = {}
    for path, leaf in leaves:
        source = source_of(parameter_path(path), num_layers=3, prefix=prefix, outer=outer)
        array = np.asarray(leaf.T if source.transposed else leaf)
        if array.shape == (8, 3 * 2 * 2):  # in the files the patches are a convolution
            array = array.reshape(8, 3, 2, 2)
        tensors[source.names[0]] = np.ascontiguousarray(array)
    assert f"{outer}vision_model.gated_positional_embedding.embedding" in tensors
    assert f"{prefix}layers.1.cross_attn_mlp_gate" in tensors
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    text = dict(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, cross_attention_layers=[1], rope_theta=1e4, rms_norm_eps=1e-6,
        max_position_embeddings=4096,
    )  # fmt: skip
    vision = dict(
        hidden_size=8, intermediate_size=12, num_hidden_layers=2, attention_heads=2, patch_size=2, image_size=4,
        num_global_layers=1, intermediate_layers_indices=[0, 1], vision_output_dim=24,
    )  # fmt: skip
    fields = {"model_type": "mllama", "text_config": text, "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(fields))
    loaded = load_pretrained(folder)
    assert loaded.config == CONFIG
    ids, mask, images = make_inputs()
    np.testing.assert_array_equal(
        loaded(ids, attention_mask=mask, images=images), model(ids, attention_mask=mask, images=images)
    )
    save_pretrained(loaded, tmp_path / "saved", source=folder)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(saved[name], array)


def test_the_text_alone_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="mllama_text_model is part of a vision-language model"):
        save_pretrained(make_model().language_model, tmp_path / "text")


FIELDS = {
    "model_type": "mllama",
    "text_config": dict(
        vocab_size=128256, hidden_size=64, intermediate_size=96, num_hidden_layers=10, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=5e5,
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position_embeddings=8192),
    ),
    "vision_config": dict(hidden_size=32, intermediate_size=48, num_hidden_layers=32, attention_heads=2, patch_size=14,
                          image_size=560, vision_output_dim=32 * 6),
}  # fmt: skip


def test_what_a_config_leaves_out_is_that_of_the_released_models():
    config = model_config(FIELDS)
    assert config.text.cross_layers == (3, 8) and config.text.num_embeddings == 128264 and not config.tied
    assert config.image_token_id == 128256 and config.text.rope.kind == "llama3"
    assert config.vision.feature_layers == (3, 7, 15, 23, 30) and config.vision.tile_patches == 1601


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(vision_output_dim=7), "vision_output_dim is 7, and the port has 192 only"),
        (dict(hidden_act="quick_gelu"), "hidden_act is 'quick_gelu', and the port has 'gelu' only"),
        (dict(intermediate_layers_indices=[40], vision_output_dim=64), "does not describe a model: feature_layers"),
    ],
)
def test_a_config_beyond_the_port_is_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        model_config(FIELDS | {"vision_config": FIELDS["vision_config"] | fields})
