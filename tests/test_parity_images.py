"""Images prepared as the processors of transformers prepare them: pixels, grids, tiles, tokens in the prompt."""

import copy
import importlib
import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from smmd_jax.backbones.image_processors import make_image_processor
from smmd_jax.backbones.mllama_images import cross_attention_mask
from smmd_jax.backbones.mllama_vision import MllamaVisionConfig
from smmd_jax.backbones.vision import VisionConfig
from tests.references import libraries

pytestmark = pytest.mark.parity

SIZES = dict(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)
VISION = {
    "mistral3": VisionConfig(**SIZES, patch_size=14),
    "qwen2_5_vl": VisionConfig(**SIZES, patch_size=14, temporal_size=2),
    "mllama": MllamaVisionConfig(
        **SIZES, patch_size=14, image_size=140, max_tiles=4, aspect_ratios=8, num_global_layers=0, feature_layers=()
    ),
}
# As the released folders have them, but for smaller images.
FIELDS = {
    "mistral3": {"size": {"longest_edge": 308}, "patch_size": 14},
    "qwen2_5_vl": {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 150, "patch_size": 14, "merge_size": 2},
    "mllama": {
        "size": {"height": 140, "width": 140}, "max_image_tiles": 4, "resample": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
}  # fmt: skip
FAMILIES = tuple(FIELDS)


def reference(family, **fields):
    """The processor of transformers that needs Pillow alone; a field that is None is left out."""
    libraries()
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    kinds = {"mistral3": PixtralImageProcessorPil, "qwen2_5_vl": Qwen2VLImageProcessorPil,
             "mllama": MllamaImageProcessorPil}  # fmt: skip
    # It writes into what it is given.
    fields = copy.deepcopy({name: value for name, value in (FIELDS[family] | fields).items() if value is not None})
    if family == "mistral3":  # its processor of text and images rounds to whole features
        fields["patch_size"] = 28
    return kinds[family](**fields)


def picture(width, height, mode="RGB", seed=0):
    """Smooth waves with noise: what a filter does to either would show."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.sin(x[..., None] / np.array([3.0, 7.0, 19.0]) + y[..., None] / 11.0) * 90 + 128
    levels = np.clip(waves + rng.normal(0, 20, waves.shape), 0, 255).astype(np.uint8)
    image = Image.fromarray(levels, "RGB")
    if mode == "RGBA":
        image.putalpha(Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8), "L"))
    elif mode == "P-transparent":
        image = image.quantize(16)
        image.info["transparency"] = 3
    elif mode != "RGB":
        image = image.convert(mode)
    return image


AWKWARD = {
    "1x1": (1, 1), "1x1 grey": (1, 1, "L"), "17x931": (17, 931), "931x17": (931, 17), "4000x30": (4000, 30),
    "30x4000": (30, 4000), "grey": (200, 123, "L"), "grey with alpha": (61, 59, "LA"), "RGBA": (333, 77, "RGBA"),
    "palette": (90, 251, "P"), "transparent palette": (90, 51, "P-transparent"), "bilevel": (140, 141, "1"),
    "cmyk": (75, 75, "CMYK"), "16 bits": (33, 44, "I;16"), "exact": (280, 140), "one less": (279, 139),
    "one more": (281, 141), "large": (1300, 900), "three wide": (3, 200), "three high": (150, 3),
}  # fmt: skip


def assert_same_arrays(family, ours, theirs, grey_level):
    names = ("image_sizes", "image_grid_thw", "aspect_ratio_ids", "aspect_ratio_mask")
    for name in [name for name in names if name in theirs]:
        np.testing.assert_array_equal(ours[name], np.asarray(theirs[name]))
    pixels, wanted = ours["pixel_values"], np.asarray(theirs["pixel_values"])
    assert pixels.shape == wanted.shape and pixels.dtype == wanted.dtype == np.float32
    np.testing.assert_allclose(pixels, wanted, atol=grey_level, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", AWKWARD)
def test_one_image(family, name):
    image = picture(*AWKWARD[name])
    process = make_image_processor(family, FIELDS[family], VISION[family])
    ours = process([[image]]).arrays
    theirs = reference(family)(image)
    assert set(ours) == set(theirs) - {"num_tiles"}
    assert_same_arrays(family, ours, theirs, 1 / 255 / max(process.std))
    # The filter is the same one of Pillow, so that not even a grey level differs.
    np.testing.assert_array_equal(ours["pixel_values"], np.asarray(theirs["pixel_values"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_all_sizes_in_one_batch(family):
    rows = [[picture(200, 90), picture(60, 300, "L")], [picture(17, 31)], [picture(500, 500, "RGBA")]]
    ours = make_image_processor(family, FIELDS[family], VISION[family])(rows)
    theirs = reference(family)(rows if family == "mllama" else [image for row in rows for image in row])
    assert_same_arrays(family, ours.arrays, theirs, 0)
    if family == "mllama":
        assert [list(row) for row in ours.tiles] == theirs["num_tiles"]


@pytest.mark.parametrize("family", FAMILIES)
def test_encoded_bytes_give_what_their_image_gives(family):
    image = picture(120, 75, "RGBA")
    file = io.BytesIO()
    image.save(file, "PNG")
    process = make_image_processor(family, FIELDS[family], VISION[family])
    assert_same_arrays(family, process([[file.getvalue()]]).arrays, reference(family)(image), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_two_thousand_images(family):
    """Grids and tiles over many sizes, without a pixel."""
    libraries()
    from transformers.models.mllama import image_processing_pil_mllama as mllama
    from transformers.models.pixtral import image_processing_pil_pixtral as pixtral
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

    from smmd_jax.backbones.mllama_images import fit_to_tiles

    process = make_image_processor(family, FIELDS[family], VISION[family])
    rng = np.random.default_rng(0)
    for height, width in np.exp(rng.uniform(0, np.log(3000), (2000, 2))).astype(int).tolist():
        if max(height, width) > 200 * min(height, width):
            continue
        if family == "mistral3":
            image = np.broadcast_to(np.uint8(0), (3, height, width))
            wanted = pixtral.get_resize_output_image_size(image, 308, 28, "channels_first")
            found = process.target_size(height, width)
        elif family == "qwen2_5_vl":
            wanted = qwen.smart_resize(height, width, 28, 56 * 56, 28 * 28 * 150)
            found = process.target_size(height, width)
        else:
            canvas = mllama.get_optimal_tiled_canvas(height, width, 4, 140)
            wanted = (tuple(side // 140 for side in canvas),
                      mllama.get_image_size_fit_to_canvas(height, width, *canvas, 140))  # fmt: skip
            found = fit_to_tiles(height, width, tile=140, max_tiles=4)
        assert found == wanted, (height, width)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral3", {"size": {"height": 196, "width": 308}}),
        ("mistral3", {"do_normalize": False, "resample": 2}),
        ("qwen2_5_vl", {"min_pixels": None, "max_pixels": None, "size": dict(shortest_edge=90000, longest_edge=99999)}),
        ("qwen2_5_vl", {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 1 / 127.5}),
        ("mllama", {"image_mean": None, "image_std": None, "resample": 3}),
    ],
)  # fmt: skip
def test_other_fields(family, fields):
    image = picture(190, 251)
    ours = make_image_processor(family, FIELDS[family] | fields, VISION[family])([[image]]).arrays
    assert_same_arrays(family, ours, reference(family, **fields)(image), 0)


def test_runs_of_pixtral(monkeypatch):
    libraries()
    # The module beside it wants torchvision, and what is compared here does not.
    name = "transformers.models.pixtral.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(get_resize_output_image_size=None))
    processing = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    tokens = SimpleNamespace(patch_size=14, spatial_merge_size=2, image_token="[IMG]", image_break_token="[IMG_BREAK]",
                             image_end_token="[IMG_END]")  # fmt: skip
    ours = make_image_processor("mistral3", FIELDS["mistral3"], VISION["mistral3"])(
        [[picture(200, 90)], [picture(17, 931), picture(1, 1)]]
    )
    theirs = [processing.PixtralProcessor.replace_image_token(tokens, ours.arrays, number) for number in range(3)]
    assert ["".join(run) for row in ours.runs for run in row] == theirs


def test_runs_of_qwen():
    libraries()
    from transformers.models.qwen2_5_vl import processing_qwen2_5_vl as processing

    tokens = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token="<|image_pad|>")
    ours = make_image_processor("qwen2_5_vl", FIELDS["qwen2_5_vl"], VISION["qwen2_5_vl"])(
        [[picture(200, 90), picture(1, 1)]]
    )
    for number, run in enumerate(ours.runs[0]):
        theirs = processing.Qwen2_5_VLProcessor.replace_image_token(tokens, ours.arrays, number)
        assert "".join(run) == f"<|vision_start|>{theirs}<|vision_end|>"


def test_cross_attention_masks():
    libraries()
    from transformers.models.mllama import processing_mllama as mllama

    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = rng.integers(0, 3, (3, rng.integers(1, 12)))  # 0 is the image token
        rows[0, 0] = 0  # the reference needs an image somewhere
        tiles = [rng.integers(1, 5, (row == 0).sum()).tolist() for row in rows]
        theirs = mllama.convert_sparse_cross_attention_mask_to_dense(
            [mllama.get_cross_attention_token_mask(row.tolist(), 0) for row in rows], tiles, 4, rows.shape[1]
        )
        ours = cross_attention_mask(rows, tiles, image_token_id=0, max_tiles=4)
        np.testing.assert_array_equal(ours, theirs)
