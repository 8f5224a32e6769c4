"""How Llama 3.2 Vision cuts an image into tiles, and which of them the tokens of a prompt read; on the host."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import ArrayLike, Int
from PIL import Image

from smmd_jax.backbones.image_pixels import ImageProcessor, ProcessedImages, check_same, processed, shared_fields
from smmd_jax.backbones.mllama_vision import MllamaVisionConfig

_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@functools.cache
def tile_arrangements(max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Return the arrangements (tiles high, tiles wide) of at most so many tiles; number k of the files is entry k - 1.

    Example:
        >>> tile_arrangements(3)
        ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))
    """
    sides = range(1, max_tiles + 1)
    return tuple((high, wide) for high in sides for wide in sides if high * wide <= max_tiles)


def fit_to_tiles(height: int, width: int, *, tile: int, max_tiles: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the arrangement of tiles for an image, and the height and width that it is resized to within them.

    The arrangement is the one that enlarges least of those that do not shrink the image, else the one that shrinks
    least, and of several the one with the fewest tiles. An image within it is enlarged only until one side is as long
    as a tile.

    Example:
        >>> fit_to_tiles(300, 1000, tile=560, max_tiles=4)
        ((1, 2), (300, 1000))
    """
    scales = {
        (high, wide): min(high * tile / height, wide * tile / width) for high, wide in tile_arrangements(max_tiles)
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    best = min(enlarging) if enlarging else max(scales.values())
    arrangement = min((key for key, scale in scales.items() if scale == best), key=math.prod)
    target_height, target_width = (
        min(max(side, tile), count * tile) for side, count in zip((height, width), arrangement, strict=True)
    )
    by_height, by_width = target_height / height, target_width / width
    if by_width < by_height:
        return arrangement, (min(math.floor(height * by_width) or 1, target_height), target_width)
    return arrangement, (target_height, min(math.floor(width * by_height) or 1, target_width))


@dataclass(frozen=True, kw_only=True)
class MllamaImages(ImageProcessor):
    """Fit each image into an arrangement of square tiles, fill it up with black, and cut the tiles apart.

    Args:
        tile: pixels along one side of a tile.
        max_tiles: most tiles of an image.
    """

    tile: int
    max_tiles: int

    token: ClassVar[str] = "<|image|>"
    default_resample: ClassVar[int] = Image.Resampling.BILINEAR
    default_scale: ClassVar[tuple] = _HALF

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], vision: MllamaVisionConfig) -> "MllamaImages":
        """Make one from the fields of preprocessor_config.json."""
        size = fields.get("size", {"height": 224, "width": 224})
        for name in ("height", "width"):
            check_same(f"size {name}", size.get(name), vision.image_size)
        check_same("max_image_tiles", fields.get("max_image_tiles", 4), vision.max_tiles)
        check_same("number of arrangements of tiles", len(tile_arrangements(vision.max_tiles)), vision.aspect_ratios)
        return cls(tile=vision.image_size, max_tiles=vision.max_tiles, **shared_fields(cls, fields))

    def run(self, height: int, width: int) -> tuple[str, ...]:
        return ("<|image|>",)

    def _process(self, rows) -> ProcessedImages:
        count = max(map(len, rows))
        pixels = np.zeros((len(rows), count, self.max_tiles, 3, self.tile, self.tile), np.float32)
        ids = np.zeros((len(rows), count), np.int64)
        there = np.zeros((len(rows), count, self.max_tiles), np.int64)
        there[:, :, 0] = 1  # also where there is no image
        tiles = [[0] * len(row) for row in rows]
        arrangements = tile_arrangements(self.max_tiles)
        for row, images in enumerate(rows):
            for number, image in enumerate(images):
                (high, wide), size = fit_to_tiles(image.height, image.width, tile=self.tile, max_tiles=self.max_tiles)
                canvas = np.zeros((high * self.tile, wide * self.tile, 3), np.uint8)
                canvas[: size[0], : size[1]] = self.resize(image, *size)
                cut = self.scale(canvas).reshape(3, high, self.tile, wide, self.tile).transpose(1, 3, 0, 2, 4)
                used = high * wide
                pixels[row, number, :used] = cut.reshape(used, 3, self.tile, self.tile)
                ids[row, number] = arrangements.index((high, wide)) + 1
                there[row, number, :used] = 1
                tiles[row][number] = used
        arrays = {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": there}
        runs = [[self.run(image.height, image.width) for image in row] for row in rows]
        return processed(arrays, runs, self.token, tiles)


def cross_attention_mask(
    input_ids: Int[ArrayLike, "B T"], tiles: Sequence[Sequence[int]], *, image_token_id: int, max_tiles: int
) -> Int[np.ndarray, "B T I M"]:
    """Return which tiles each token reads: those of the image before it, from the image's own token on.

    Of images that follow one another without text between, all are read by the text after them.

    Args:
        input_ids: int [B, T].
        tiles: per row the tiles of its images, as `ProcessedImages.tiles`.
        image_token_id: of the token that an image is.
        max_tiles: M.

    Returns:
        0 or 1, with as many images I as the row with the most has.

    Raises:
        ValueError: a row with another number of image tokens than images.

    Example:
        >>> mask = cross_attention_mask(np.array([[5, 9, 6]]), [[2]], image_token_id=9, max_tiles=4)
        >>> mask[0, :, 0].tolist()
        [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    """
    input_ids = np.asarray(input_ids)
    batch, length = input_ids.shape
    if len(tiles) != batch:
        raise ValueError(f"input_ids hold {batch} rows and tiles {len(tiles)}: make them equal")
    mask = np.zeros((batch, length, max(map(len, tiles), default=0), max_tiles), np.int64)
    for row, counts in enumerate(tiles):
        starts = np.flatnonzero(input_ids[row] == image_token_id).tolist()
        if len(starts) != len(counts):
            raise ValueError(
                f"row {row} holds {len(starts)} image tokens (id {image_token_id}) and {len(counts)} images: write one "
                "image token per image"
            )
        end = following = length
        for number in reversed(range(len(starts))):
            start = starts[number]
            # An image without text of its own is read as far as the one after it.
            end = end if start + 1 == following else following
            mask[row, start:end, number, : counts[number]] = 1
            following = start
    return mask
