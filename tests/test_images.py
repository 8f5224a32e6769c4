"""Images in patches without a model: blocks, tables, buckets, the place of features and positions of three axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smmd_jax.backbones.images import (
    bucket_length,
    deal_images,
    in_blocks,
    named_arrays,
    pack_images,
    patches_of,
    place_features,
)
from smmd_jax.backbones.qwen_vision import grid_positions

IMAGE = 9


def pixels_of(height, width):
    """Every pixel holds its own place, so that a wrong order shows."""
    return np.arange(3 * height * width, dtype=np.float32).reshape(3, height, width)


def test_patches_come_in_blocks_and_hold_their_pixels_channel_by_channel():
    pixels = pixels_of(4, 8)
    patches = patches_of(pixels, 2, 2)
    assert patches.shape == (8, 12)
    order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]  # two blocks of 2 x 2 patches
    for patch, (row, column) in zip(patches, order, strict=True):
        wanted = pixels[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        np.testing.assert_array_equal(patch, wanted.reshape(-1))


def test_tables_say_where_each_patch_lies_within_its_row():
    sizes = [[(4, 6), (2, 2)], [], [(2, 4)]]
    images = [[np.full((high * wide, 5), high) for high, wide in row] for row in sizes]
    packed = pack_images(images, sizes, numbers=5, merge=2, window=1)
    assert packed.patches.shape == (3, 2, 24, 5)
    assert not packed.real[1].any() and not packed.real[2, 1].any() and (packed.order[1] == -1).all()
    for row, number, (high, wide) in [(0, 0, (4, 6)), (0, 1, (2, 2)), (2, 0, (2, 4))]:
        real = packed.real[row, number]
        assert real.sum() == high * wide and real[: high * wide].all()
        assert (packed.patches[row, number][real] == high).all() and not packed.patches[row, number][~real].any()
        places = np.stack([packed.rows[row, number], packed.columns[row, number]], -1)[real]
        wanted = in_blocks(np.moveaxis(np.indices((high, wide)), 0, -1), 2).reshape(-1, 2)
        np.testing.assert_array_equal(places, wanted)
        # One block a window: its four patches share a number that no other block has.
        windows = packed.windows[row, number][real].reshape(-1, 4)
        assert (windows == windows[:, :1]).all() and len(set(windows[:, 0])) == len(windows)
    # The second image of a row has the cells from 6 on; the image of another row begins at 0 again.
    assert packed.order[0].tolist() == [0, 1, 2, 3, 4, 5, 6, *[-1] * 5]
    assert packed.order[2].tolist() == [0, 1, *[-1] * 10]


def test_every_array_has_the_rows_first_and_needs_no_other_row():
    sizes = [[(4, 6), (2, 2)], [(2, 4)]]
    images = [[np.random.default_rng(0).random((high * wide, 5)) for high, wide in row] for row in sizes]
    whole = pack_images(images, sizes, numbers=5, merge=2)
    for row in range(2):
        # The longest image and the row with most of them set the size of the arrays, and nothing else.
        alone = pack_images([images[row]], [sizes[row]], numbers=5, merge=2, length=24)
        for found, wanted in zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(found[row][tuple(map(slice, wanted.shape[1:]))], wanted[0])


def test_windows_at_the_border_are_smaller():
    packed = pack_images([[np.ones((6 * 10, 1))]], [[(6, 10)]], numbers=1, merge=2, window=2)
    sizes = np.unique(packed.windows[0, 0][packed.real[0, 0]], return_counts=True)[1]
    assert sorted(sizes.tolist()) == [4, 8, 8, 8, 16, 16]  # 3 x 5 blocks in windows of 2 x 2


def test_many_sizes_give_few_shapes():
    rng = np.random.default_rng(0)
    lengths = {bucket_length(int(4 * rows * columns), multiple=4) for rows, columns in rng.integers(1, 40, (500, 2))}
    assert len(lengths) <= 20
    for patches in range(4, 5000, 4):
        length = bucket_length(patches, multiple=4)
        assert patches <= length and length % 4 == 0 and (length < 1.5 * patches or length == 16)


@pytest.mark.parametrize(
    "images, grids, options, words",
    [
        ([np.ones((6, 1))], [(2, 3)], {}, "has 2 x 3 patches, wanted multiples of 2"),
        ([np.ones((8, 1))], [(2, 2)], {}, "has 8 patches of 1 numbers for a grid of 2 x 2 with 1"),
        ([np.ones((4, 3))], [(2, 2)], {}, "has 4 patches of 3 numbers for a grid of 2 x 2 with 1"),
        ([np.ones((16, 1))], [(4, 4)], {"length": 8}, "length is 8, wanted a multiple of 4 and at least 16"),
    ],
)
def test_images_that_do_not_fit_say_so(images, grids, options, words):
    with pytest.raises(ValueError, match=words):
        pack_images([images], [grids], numbers=1, merge=2, **options)
    with pytest.raises(ValueError, match="30 x 28 pixels, wanted multiples of 28"):
        patches_of(np.zeros((3, 30, 28)), 14, 2)


@pytest.mark.parametrize("compile", [False, True])
def test_features_take_the_places_of_the_image_tokens_of_their_row(compile):
    ids = jnp.array([[1, IMAGE, IMAGE, 2], [IMAGE, 3, 4, IMAGE]])
    embeddings = jnp.zeros((2, 4, 2))
    features = jnp.arange(1.0, 13.0).reshape(2, 3, 2)
    place = jax.jit(place_features, static_argnums=2) if compile else place_features
    placed = place(embeddings, ids, IMAGE, features, jnp.array([[0, 1, -1], [0, 2, -1]]))
    np.testing.assert_array_equal(placed[ids == IMAGE], features[jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 0, 2])])
    assert not placed[ids != IMAGE].any()
    # One image token too many is never filled with another image's feature.
    short = place(embeddings, ids, IMAGE, features, jnp.array([[0, 1, -1], [0, -1, -1]]))
    assert jnp.isnan(short[1, 3]).all() and jnp.isfinite(short[0]).all()


def test_image_tokens_are_as_many_as_the_features_of_their_row():
    assert deal_images(np.array([[IMAGE, 1, IMAGE], [1, 1, IMAGE]]), IMAGE, [1, 1, 1]) == [range(0, 2), range(2, 3)]
    with pytest.raises(ValueError, match=r"hold 2 image tokens .* give 3 features"):
        deal_images(np.array([[IMAGE, 1, IMAGE]]), IMAGE, [1, 2])
    with pytest.raises(ValueError, match=r"row 0 holds 1 image tokens .* give 2 features"):
        deal_images(np.array([[1, 1, IMAGE], [IMAGE, 1, IMAGE]]), IMAGE, [2, 1])


def test_positions_count_an_image_by_its_longer_side_and_padding_not_at_all():
    ids = np.array([[0, 0, 5, *[IMAGE] * 6, 6, 7]])
    mask = (np.arange(11) >= 2).astype(int)[None]
    found = grid_positions(ids, np.array([[1, 4, 6]]), image_token_id=IMAGE, merge=2, attention_mask=mask)[:, 0]
    assert found[:, 2].tolist() == [0, 0, 0]
    assert found[:, 3:9].tolist() == [[1] * 6, [1, 1, 1, 2, 2, 2], [1, 2, 3, 1, 2, 3]]
    assert found[:, 9:].tolist() == [[4, 5]] * 3  # 1 + max(2, 3)


@pytest.mark.parametrize(
    "row, grids, words",
    [
        ([1, IMAGE], [], "image tokens beyond the 0 images"),
        ([IMAGE, 1], [[1, 2, 4]], "has 1 image tokens in a row, its image gives 2 features"),
        ([1, 2], [[1, 2, 2]], "image tokens for fewer"),
    ],
)
def test_positions_need_the_images_of_the_prompt(row, grids, words):
    with pytest.raises(ValueError, match=words):
        grid_positions(np.array([row]), np.array(grids).reshape(-1, 3), image_token_id=IMAGE, merge=2)


@pytest.mark.parametrize(
    "images, error, words",
    [
        ([1], TypeError, "images is list, wanted a dict of arrays: pixel_values, image_sizes"),
        ({1: 2}, TypeError, "wanted a dict of arrays"),
        ({}, ValueError, "images hold nothing, wanted pixel_values, image_sizes"),
        ({"pixel_values": 0, "image_grid_thw": 0}, ValueError, "images hold image_grid_thw, pixel_values, wanted"),
        ({"pixel_values": None}, ValueError, r"pixel_values has shape \[\], wanted \[I, 3, H, W\]"),
        ({"pixel_values": [[1.0], [1.0, 2.0]]}, ValueError, "pixel_values is ragged"),
        ({"pixel_values": np.zeros((1, 1, 4, 4))}, ValueError, r"has shape \[1, 1, 4, 4\], wanted \[I, 3, H, W\]"),
        ({"pixel_values": np.zeros((1, 3, 4, 4), int)}, TypeError, "wanted the floating point numbers"),
        ({"pixel_values": np.full((1, 3, 4, 4), np.nan)}, ValueError, "holds NaN or infinity"),
        ({"image_sizes": np.array([[4.0, 4.0]])}, TypeError, "image_sizes is float64, wanted integers"),
        ({"image_sizes": np.array([[-4, 4]])}, ValueError, "image_sizes holds -4 to 4, wanted non-negative"),
        ({"image_sizes": np.array([[4, 1 << 40]])}, ValueError, "wanted non-negative 32-bit integers"),
        ({"image_sizes": np.array([4, 4])}, ValueError, r"image_sizes has shape \[2\], wanted \[I, 2\]"),
    ],
)
def test_arrays_of_a_processor_are_checked_on_the_host(images, error, words):
    if isinstance(images, dict) and images.keys() <= {"pixel_values", "image_sizes"} and images:
        images = {"pixel_values": np.zeros((1, 3, 4, 4)), "image_sizes": np.array([[4, 4]]), **images}
    with pytest.raises(error, match=words):
        named_arrays(images, pixel_values="float I 3 H W", image_sizes="int I 2")
