"""Images on their way into a model, without transformers: what is read, refused and counted, and how many shapes."""

import functools
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from smmd_jax.backbones import BACKBONES, DecoderConfig, RopeConfig, VisionLanguageConfig
from smmd_jax.backbones.image_pixels import open_image
from smmd_jax.backbones.image_processors import IMAGE_PROCESSORS, make_image_processor, read_preprocessor
from smmd_jax.backbones.images import bucket_length
from smmd_jax.backbones.mllama_images import cross_attention_mask, fit_to_tiles
from smmd_jax.backbones.mllama_vision import MllamaVisionConfig
from smmd_jax.backbones.pixtral_images import pixtral_run
from smmd_jax.backbones.vision import VisionConfig
from smmd_jax.errors import CheckpointError

TEXT = dict(vocab_size=60, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=1)
TOWER = dict(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, patch_size=14)
CONFIGS = {
    "mistral3": (DecoderConfig(**TEXT), VisionConfig(**TOWER), 10),
    "qwen2_5_vl": (
        DecoderConfig(**TEXT, rope=RopeConfig(sections=(1, 1, 2))),
        VisionConfig(**TOWER, temporal_size=2, window_size=56, mlp_bias=True), 10,
    ),
    "mllama": (
        DecoderConfig(**TEXT, tied=False, cross_layers=(1,), extra_embeddings=8),
        MllamaVisionConfig(
            **TOWER, image_size=56, max_tiles=4, aspect_ratios=8, num_global_layers=1, feature_layers=(0,)
        ), 60,
    ),
}  # fmt: skip
FIELDS = {
    "mistral3": {"size": {"longest_edge": 280}, "patch_size": {"height": 14, "width": 14}},
    "qwen2_5_vl": {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 100},
    "mllama": {"size": {"height": 56, "width": 56}},
}
FAMILIES = tuple(IMAGE_PROCESSORS)


@functools.cache
def make_model(family):
    """A model without memory: what its images become on the host needs no parameter."""
    text, vision, token = CONFIGS[family]
    config = VisionLanguageConfig(model_type=family, text=text, vision=vision, image_token_id=token)
    return nnx.eval_shape(lambda: BACKBONES[family](config, rngs=nnx.Rngs(0)))


def processor(family, **fields):
    return make_image_processor(family, FIELDS[family] | fields, CONFIGS[family][1])


def blank(width, height, mode="RGB"):
    return Image.new(mode, (width, height))


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def prompts(family, processed, extra=0):
    """Token rows with the image tokens that the images ask for, `extra` more of them in the last row."""
    token = CONFIGS[family][2]
    rows = [[1] + [token] * sum(row) + [2] * 3 for row in processed.image_tokens]
    rows[-1] = [token] * extra + rows[-1] if extra >= 0 else rows[-1][:1] + rows[-1][1 - extra :]
    width = max(map(len, rows))
    ids = np.array([row + [0] * (width - len(row)) for row in rows])
    return ids, (ids != 0).astype(np.int32)


def model_arrays(family, processed, ids):
    if family != "mllama":
        return processed.arrays
    mask = np.ones((*ids.shape, *processed.arrays["aspect_ratio_ids"].shape[1:], 4), np.int32)
    return processed.arrays | {"cross_attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_holds_as_many_image_tokens_as_there_are_features(family):
    processed = processor(family)([[blank(100, 50)], [blank(30, 300), blank(1, 1, "L")]])
    ids, mask = prompts(family, processed)
    make_model(family).prepare(ids, mask, model_arrays(family, processed, ids))
    for extra in (1, -1):
        ids, mask = prompts(family, processed, extra)
        found = int((ids == CONFIGS[family][2]).sum()) if family != "mllama" else 2 + extra
        wanted = sum(map(sum, processed.image_tokens)) if family != "mllama" else 2
        with pytest.raises(ValueError, match=rf"\b{found} image tokens .* {wanted} (features|images)"):
            make_model(family).prepare(ids, mask, model_arrays(family, processed, ids))


def test_tokens_of_an_image():
    assert pixtral_run(1, 3) == ("[IMG]",) * 3 + ("[IMG_END]",)
    assert pixtral_run(2, 2) == ("[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG]", "[IMG]", "[IMG_END]")
    processed = processor("mistral3")([[blank(57, 28)], []])  # 3 x 1 features
    assert processed.runs == ((pixtral_run(1, 3),), ()) and processed.image_tokens == ((3,), ())
    processed = processor("qwen2_5_vl")([[blank(84, 56)]])
    assert processed.runs == ((("<|vision_start|>", *("<|image_pad|>",) * 6, "<|vision_end|>"),),)
    assert processed.arrays["image_grid_thw"].tolist() == [[1, 4, 6]] and processed.image_tokens == ((6,),)
    processed = processor("mllama")([[blank(112, 50), blank(9, 9)], [blank(56, 56)]])
    assert processed.runs == ((("<|image|>",),) * 2, (("<|image|>",),)) and processed.tiles == ((2, 1), (1,))
    assert processed.arrays["aspect_ratio_ids"].tolist() == [[2, 1], [1, 0]]


def test_what_fills_a_tile_is_black_and_what_is_no_tile_is_zero():
    white = Image.new("RGB", (112, 28), (255, 255, 255))
    pixels = processor("mllama")([[white]]).arrays["pixel_values"][0, 0]
    assert (pixels[:2, :, :28] == 1).all() and (pixels[:2, :, 28:] == -1).all() and (pixels[2:] == 0).all()


def test_tiles_by_hand():
    assert fit_to_tiles(1, 1, tile=560, max_tiles=4) == ((1, 1), (560, 560))
    assert fit_to_tiles(560, 561, tile=560, max_tiles=4) == ((1, 2), (560, 561))
    # Nothing holds it: the arrangement that shrinks least, and a side is never less than one pixel.
    assert fit_to_tiles(10_000, 3, tile=560, max_tiles=4) == ((4, 1), (2240, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "most"), [("mistral3", 11), ("qwen2_5_vl", 11), ("mllama", 1)])
def test_two_hundred_sizes_give_a_handful_of_shapes(family, most):
    """A program is compiled for each shape; from 4 to 400 patches there are two a doubling."""
    rng = np.random.default_rng(0)
    process, model = processor(family), make_model(family)
    shapes, sizes = set(), set()
    for width, height in rng.integers(20, 400, (200, 2)).tolist():
        processed = process([[blank(width, height)]])
        ids, mask = prompts(family, processed)
        images = model.prepare(ids, mask, model_arrays(family, processed, ids))[1]
        packed = images.pixel_values if family == "mllama" else images.patches
        shapes.add(packed.shape)
        sizes.add(processed.arrays["pixel_values"].shape)
    assert len(shapes) <= most, shapes
    if family != "mllama":
        assert len(sizes) > 3 * most, "without buckets there would be many"


@pytest.mark.parametrize(("family", "most"), [("mistral3", 5), ("qwen2_5_vl", 6)])
def test_sizes_of_charts_give_a_handful_of_shapes(family, most):
    """300 x 300 to 900 x 600 pixels, with the bounds of the released processors."""
    released = {"mistral3": {"size": {"longest_edge": 1540}}, "qwen2_5_vl": {"max_pixels": 12_845_056}}
    process = processor(family, **released[family])
    rng = np.random.default_rng(0)
    sizes = {process.target_size(*size) for size in rng.integers(300, (600, 900), (200, 2)).tolist()}
    shapes = {bucket_length(height * width // 14**2, multiple=4) for height, width in sizes}
    assert len(shapes) <= most and len(sizes) > 100, (len(sizes), shapes)


def test_bytes_are_turned_upright_and_an_open_image_is_taken_as_it_is():
    image = blank(40, 20)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(image, "JPEG", exif=exif)
    assert open_image(data).size == (20, 40)
    assert open_image(Image.open(io.BytesIO(data))).size == (40, 20)


def test_what_is_transparent_lies_on_white():
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert [open_image(encode(image)).getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (10, 20, 30)]


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (b"", ValueError, "these 0 bytes are no image"),
        (b"not an image", ValueError, "these 12 bytes are no image"),
        (encode(Image.effect_noise((64, 64), 50))[:-900], ValueError, "are no image that can be read"),
        ("chart.png", TypeError, "an image is a str, wanted a PIL image or the bytes"),
        (blank(0, 3), ValueError, "0 x 3 pixels, wanted at least one"),
    ],
)
def test_what_is_no_image_is_refused(image, error, message):
    with pytest.raises(error, match=message):
        open_image(image)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("mistral3", (4000, 3), "no pixel left on one side when the other fits in 280 x 280: crop it"),
        ("qwen2_5_vl", (4020, 20), "4020 x 20 pixels, wanted no side above 200 times the other: crop it"),
    ],
)
def test_images_that_no_size_fits_are_refused(family, size, message):
    with pytest.raises(ValueError, match=message):
        processor(family)([[blank(*size)]])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_image_at_all_is_refused(family):
    with pytest.raises(ValueError, match="got no images: leave images out"):
        processor(family)([[], []])


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mistral3", {"patch_size": 16}, "patch_size is 16 in preprocessor_config.json and 14 in the tower"),
        ("mistral3", {"size": {"shortest_edge": 9}}, "wanted longest_edge, or height and width"),
        ("mistral3", {"do_resize": False}, "do_resize is False, and images are always resized"),
        ("mistral3", {"do_center_crop": True}, "do_center_crop is True, and images are always resized and never"),
        ("qwen2_5_vl", {"merge_size": 3}, "merge_size is 3 in .* and 2 in the tower"),
        ("qwen2_5_vl", {"temporal_patch_size": 1}, "temporal_patch_size is 1 in .* and 2 in the tower"),
        ("qwen2_5_vl", {"resample": 9}, "resample is 9, wanted one of Pillow's filters"),
        ("qwen2_5_vl", {"image_std": [1, 1, 0]}, "wanted three each, and std above 0"),
        ("qwen2_5_vl", {"min_pixels": 10**9}, "min_pixels is 1000000000 and max_pixels 78400"),
        ("mllama", {"size": {"height": 56, "width": 28}}, "size width is 28 in .* and 56 in the tower"),
        ("mllama", {"max_image_tiles": 6}, "max_image_tiles is 6 in .* and 4 in the tower"),
    ],
)
def test_fields_beyond_the_processor_are_refused(family, fields, message):
    with pytest.raises(CheckpointError, match=message):
        processor(family, **fields)


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="model_type is 'llava', wanted one of mistral3, qwen2_5_vl, mllama"):
        make_image_processor("llava", {}, CONFIGS["mistral3"][1])


def test_fields_are_found_in_either_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"has neither preprocessor_config\.json nor processor_config\.json"):
        read_preprocessor(tmp_path)
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({"patch_size": 14}))
    with pytest.raises(CheckpointError, match="does not say how images are prepared"):
        read_preprocessor(tmp_path)
    path.write_text(json.dumps({"image_processor": FIELDS["mistral3"], "spatial_merge_size": 2}))
    assert read_preprocessor(tmp_path) == FIELDS["mistral3"]
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, wanted an object"):
        read_preprocessor(tmp_path)


def test_the_tiles_that_a_token_reads_by_hand():
    ids = np.array([[9, 1, 9, 9, 2, 0], [1, 1, 9, 3, 3, 3]])
    mask = cross_attention_mask(ids, [[1, 2, 1], [4]], image_token_id=9, max_tiles=4).any(-1)
    assert mask[0].T.astype(int).tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert mask[1].T.astype(int).tolist() == [[0, 0, 1, 1, 1, 1], [0] * 6, [0] * 6]
    with pytest.raises(ValueError, match=r"row 1 holds 1 image tokens .id 9. and 2 images"):
        cross_attention_mask(ids, [[1, 2, 1], [4, 1]], image_token_id=9, max_tiles=4)
    with pytest.raises(ValueError, match="input_ids hold 2 rows and tiles 1"):
        cross_attention_mask(ids, [[1]], image_token_id=9, max_tiles=4)


@pytest.mark.realdata
@pytest.mark.parametrize("family", FAMILIES)
def test_real_charts_and_dials(family):
    folder = os.environ.get("SMMD_DATA_DIR")
    if folder is None:
        pytest.skip("SMMD_DATA_DIR is not set: no real images")
    paths = [path for name in ("chartqa_sample", "clocks_sample") for kind in ("png", "jpg", "jpeg")
             for path in sorted(Path(folder, name).rglob(f"*.{kind}"))[:6]]  # fmt: skip
    assert len(paths) > 6
    processed = processor(family)([[path.read_bytes()] for path in paths])
    ids, mask = prompts(family, processed)
    make_model(family).prepare(ids, mask, model_arrays(family, processed, ids))
    assert np.isfinite(processed.arrays["pixel_values"]).all() and processed.arrays["pixel_values"].std() > 0.3
