"""Images row by row: what a batch of prepared images holds, and that a row does not see the images of another."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from smmd_jax.backbones import BACKBONES, VisionLanguageConfig
from smmd_jax.backbones.config import DecoderConfig
from smmd_jax.backbones.image_rows import make_image_rows
from smmd_jax.backbones.mllama_images import cross_attention_mask
from smmd_jax.backbones.mllama_vision import MllamaVisionConfig
from smmd_jax.backbones.rope import RopeConfig
from smmd_jax.backbones.vision import VisionConfig

TEXT = DecoderConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1)
TOWER = dict(hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, patch_size=2)
CONFIGS = {
    "mistral3": VisionLanguageConfig(
        model_type="mistral3", text=TEXT, vision=VisionConfig(**TOWER), image_token_id=9
    ),
    "qwen2_5_vl": VisionLanguageConfig(
        model_type="qwen2_5_vl",
        text=dataclasses.replace(
            TEXT, model_type="qwen2_5_vl_text", rope=RopeConfig(sections=(1, 1, 2)), qkv_bias=True
        ),
        vision=VisionConfig(**TOWER, temporal_size=2, window_size=8, full_layers=(1,), norm_eps=1e-6, mlp_bias=True),
        image_token_id=9,
    ),
    "mllama": VisionLanguageConfig(
        model_type="mllama",
        text=dataclasses.replace(
            TEXT, model_type="mllama_text_model", tied=False, cross_layers=(1,), extra_embeddings=8
        ),
        vision=MllamaVisionConfig(
            **TOWER, image_size=8, max_tiles=4, aspect_ratios=8, num_global_layers=1, feature_layers=(0,)
        ),
        image_token_id=32,
    ),
}
FIELDS = {
    "mistral3": {"size": {"longest_edge": 16}, "patch_size": 2},
    "qwen2_5_vl": {"min_pixels": 16, "max_pixels": 400, "patch_size": 2},
    "mllama": {"size": {"height": 8, "width": 8}},
}
SPECIALS = {"<|vision_start|>": 10, "<|vision_end|>": 11, "[IMG_BREAK]": 12, "[IMG_END]": 13}
SIZES = [(12, 16), None, (5, 7), (30, 9)]


@pytest.fixture(params=CONFIGS)
def rows(request):
    return make_image_rows(CONFIGS[request.param], FIELDS[request.param])


def ids_of(rows, size):
    run = () if size is None else rows.run(*size)
    return [rows.config.image_token_id if name == rows.process.token else SPECIALS[name] for name in run] + [1, 2, 3]


def make_batch(rows, sizes, *, left=False, width=40):
    """(input_ids, real, images, room) of these sizes, every pixel of an image drawn."""
    ids, real = np.zeros((len(sizes), width), np.int32), np.zeros((len(sizes), width), bool)
    images = []
    for row, size in enumerate(sizes):
        tokens = ids_of(rows, size)
        columns = slice(width - len(tokens), None) if left else slice(None, len(tokens))
        ids[row, columns], real[row, columns] = tokens, True
        pixels = np.random.default_rng(SIZES.index(size)).integers(0, 256, (*(size or (1, 1)), 3), np.uint8)
        images.append(None if size is None else rows.prepare(Image.fromarray(pixels)))
    room = rows.rooms(np.array([size or (0, 0) for size in SIZES])).max()
    return ids, real, images, room


@functools.cache
def make_model(config):
    graphdef, state = nnx.split(BACKBONES[config.model_type](config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)  # new gates are 0, which would hide the images of mllama
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf + 0.3 * rng.standard_normal(leaf.shape), state))


@nnx.jit
def run(model, ids, **options):
    return model(ids, **options)


def logits_of(model, rows, sizes, **options):
    ids, real, images, room = make_batch(rows, sizes, **options)
    laid, positions = rows.lay_out(ids, real, images, room=room)
    assert all(leaf.shape[0] == len(sizes) for leaf in jax.tree.leaves((laid, positions)))
    positions = None if positions is None else jnp.moveaxis(positions, 1, 0)
    logits = run(model, ids, attention_mask=real, positions=positions, images=laid)
    return [np.asarray(row[there]) for row, there in zip(logits, real, strict=True)]


def test_a_row_does_not_depend_on_the_others_or_on_the_side_of_the_padding(rows):
    model = make_model(rows.config)
    whole = logits_of(model, rows, SIZES)
    for found in (logits_of(model, rows, SIZES[::-1])[::-1], logits_of(model, rows, SIZES, left=True)):
        for ours, wanted in zip(found, whole, strict=True):
            np.testing.assert_allclose(ours, wanted, atol=1e-5)
    # The image reaches the text.
    other = logits_of(model, rows, [SIZES[2], None, SIZES[0], SIZES[3]])
    assert other[0].shape != whole[0].shape or np.abs(other[0] - whole[0])[-1].max() > 1e-4


def test_it_gives_what_the_arrays_of_the_processor_give(rows):
    model = make_model(rows.config)
    sizes = [size for size in SIZES if size]
    whole = logits_of(model, rows, sizes)
    ids, real, _, _ = make_batch(rows, sizes)
    pictures = [
        Image.fromarray(np.random.default_rng(SIZES.index(size)).integers(0, 256, (*size, 3), np.uint8))
        for size in sizes
    ]
    found = rows.process([[picture] for picture in pictures])
    arrays = dict(found.arrays)
    if rows.config.model_type == "mllama":
        arrays["cross_attention_mask"] = cross_attention_mask(
            ids, found.tiles, image_token_id=rows.config.image_token_id, max_tiles=4
        )
    tokens, laid, positions = model.prepare(ids, real, arrays)
    wanted = np.asarray(run(model, tokens, attention_mask=real, images=laid, positions=positions))
    for row, ours in enumerate(whole):
        np.testing.assert_allclose(ours, wanted[row][real[row]], atol=1e-5)


def test_tokens_come_from_the_size_alone(rows):
    for size in [(12, 16), (5, 7), (30, 9), (1, 1), (100, 8)]:
        found = rows.process([[Image.new("RGB", size[::-1])]])
        assert rows.run(*size) == found.runs[0][0]


def test_a_batch_without_images_is_still_one(rows):
    ids, real, images, room = make_batch(rows, [None, None])
    laid, _ = rows.lay_out(ids, real, images, room=room)
    model = make_model(rows.config)
    assert np.isfinite(model.image_features(jax.tree.map(jnp.asarray, laid))).all()


def test_a_few_lengths_are_kept_and_many_are_rounded_up():
    rows = make_image_rows(CONFIGS["qwen2_5_vl"], FIELDS["qwen2_5_vl"])
    few = np.array([(12, 12), (0, 0), (16, 16), (12, 12)])
    assert rows.rooms(few).tolist() == [36, 0, 64, 36]
    many = np.array([(4 * side, 4) for side in range(4, 12)])
    assert set(rows.rooms(many).tolist()) <= {16, 24, 32, 48} and (rows.rooms(many) >= 4 * np.arange(4, 12)).all()


def test_another_number_of_image_tokens_is_named(rows):
    ids, real, images, room = make_batch(rows, SIZES)
    ids[0, np.argmax(ids[0] == rows.config.image_token_id)] = 1

    with pytest.raises(ValueError, match=r"row 0 holds \d+ image tokens \(id \d+\) and its image gives \d+"):
        rows.lay_out(ids, real, images, room=room)



def test_prepared_images_need_their_positions():
    rows = make_image_rows(CONFIGS["qwen2_5_vl"], FIELDS["qwen2_5_vl"])
    ids, real, images, room = make_batch(rows, SIZES)
    laid, _ = rows.lay_out(ids, real, images, room=room)
    with pytest.raises(ValueError, match="positions of three axes"):
        make_model(rows.config)(ids, attention_mask=real, images=laid)
