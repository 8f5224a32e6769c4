"""Batches of rows with at most one image each: the tokens of an image, what is kept of it, and the batch for a model.

Everything here is on the host and needs Pillow. Images are prepared one by one, so that what was prepared can be kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from smmd_jax.backbones.image_pixels import ImageInput, ImageProcessor
from smmd_jax.backbones.image_processors import make_image_processor
from smmd_jax.backbones.images import PatchedImages, bucket_length, pack_images
from smmd_jax.backbones.mllama_images import cross_attention_mask
from smmd_jax.backbones.mllama_vision import TiledImages
from smmd_jax.backbones.ports import BACKBONES
from smmd_jax.backbones.qwen_vision import grid_positions
from smmd_jax.backbones.vlm import VisionLanguageConfig

_FEW = 4  # lengths that a data set may have without being rounded up
_NONE = frozenset({(0, 0)})


@dataclass(frozen=True, kw_only=True)
class PreparedImage:
    """Hold one image as its tower reads it.

    Attributes:
        pixels: float32, patches [L, K], or tiles [M, channels, size, size] (mllama).
        grid: rows and columns of patches; mllama: (number of the arrangement of the tiles, tiles).
    """

    pixels: np.ndarray
    grid: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """What all families share; `make_image_rows` makes the one of a model.

    Args:
        config: of the model.
        process: the model's image processor.
    """

    config: VisionLanguageConfig
    process: ImageProcessor

    def run(self, height: int, width: int) -> tuple[str, ...]:
        """Return the special tokens that stand for an image of this size in a prompt."""
        return self.process.run(height, width)

    def rooms(self, sizes: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "n"]:
        """Return how long the batch of each image of a data set is, which decides the program that it runs in.

        A few lengths are kept as they are; where there are more, each is rounded up to a bucket.

        Args:
            sizes: height and width of each image; 0 and 0: no image, which needs no room.
        """
        raise NotImplementedError  # each layout has its own

    def prepare(self, image: ImageInput) -> PreparedImage:
        """Resize, scale and cut one image."""
        raise NotImplementedError  # each layout has its own

    def lay_out(
        self,
        input_ids: Int[np.ndarray, "B T"],
        real: Bool[np.ndarray, "B T"],
        images: Sequence[PreparedImage | None],
        *,
        room: int,
    ) -> tuple[PatchedImages | TiledImages, Int[np.ndarray, "B 3 T"] | None]:
        """Make what a model takes beside the tokens of a batch.

        Args:
            input_ids: the rows, each with the image tokens of its own image.
            real: padding is False; it may stand on either side.
            images: per row its image, or None.
            room: the largest of the images' `rooms`, or more.

        Returns:
            (images, positions): every array has the rows first; positions are those of rows that hold one example, and
            None where the model counts them itself.

        Raises:
            ValueError: a row whose image tokens are not as many as its image gives features; the message has both.
        """
        raise NotImplementedError  # each layout has its own


class PatchedRows(ImageRows):
    """Images whose features take the place of image tokens (mistral3, qwen2_5_vl)."""

    def rooms(self, sizes):
        cell = self.config.vision.merge_size**2
        features = {size: self.run(*size).count(self.process.token) for size in set(map(tuple, sizes.tolist())) - _NONE}
        lengths = {size: count * cell for size, count in features.items()}
        if len(set(lengths.values())) > _FEW:
            lengths = {size: bucket_length(length, multiple=cell) for size, length in lengths.items()}
        return np.array([lengths.get(tuple(size), 0) for size in sizes.tolist()], np.int32)

    def prepare(self, image: ImageInput) -> PreparedImage:
        arrays = self.process([[image]]).arrays
        (patches,), grids = BACKBONES[self.config.model_type].cut(arrays, self.config.vision)
        return PreparedImage(pixels=patches, grid=tuple(grids[0, 1:].tolist()))

    def lay_out(self, input_ids, real, images, *, room):
        config, vision = self.config, self.config.vision
        cell = vision.merge_size**2
        found = ((input_ids == config.image_token_id) & real).sum(1).tolist()
        for row, (count, image) in enumerate(zip(found, images, strict=True)):
            _check_count(row, count, 0 if image is None else len(image.pixels) // cell, config, "features")
        packed = pack_images(
            [[] if image is None else [image.pixels] for image in images],
            [[] if image is None else [image.grid] for image in images],
            numbers=vision.patch_numbers, merge=vision.merge_size, window=vision.window_blocks, length=room,
        )  # fmt: skip
        if config.text.rope.sections is None:
            return packed, None
        grids = np.array([(1, *image.grid) for image in images if image is not None], np.int32).reshape(-1, 3)
        positions = grid_positions(
            input_ids, grids, image_token_id=config.image_token_id, merge=vision.merge_size, attention_mask=real
        )
        return packed, np.moveaxis(positions, 1, 0)


class TiledRows(ImageRows):
    """Images that layers of the text read, one token each (mllama)."""

    def rooms(self, sizes):
        # All tiles have one size, and those that are not there are computed too.
        return np.where(sizes.any(1), self.config.vision.max_tiles, 0).astype(np.int32)

    def prepare(self, image: ImageInput) -> PreparedImage:
        found = self.process([[image]])
        (tiles,), number = found.tiles[0], int(found.arrays["aspect_ratio_ids"][0, 0])
        return PreparedImage(pixels=found.arrays["pixel_values"][0, 0, :tiles], grid=(number, tiles))

    def lay_out(self, input_ids, real, images, *, room):
        config, vision = self.config, self.config.vision
        is_token = (input_ids == config.image_token_id) & real
        for row, (count, image) in enumerate(zip(is_token.sum(1).tolist(), images, strict=True)):
            _check_count(row, count, int(image is not None), config, "images")
        rows, tiles = len(images), vision.max_tiles
        pixels = np.zeros((rows, 1, tiles, vision.channels, vision.image_size, vision.image_size), np.float32)
        numbers, there = np.zeros((rows, 1), np.int32), np.zeros((rows, 1, tiles), bool)
        there[:, :, 0] = True  # also where there is no image, as the processor has it
        for row, image in enumerate(images):
            if image is not None:
                number, count = image.grid
                pixels[row, 0, :count], numbers[row, 0], there[row, 0, :count] = image.pixels, number, True
        counts = [[] if image is None else [image.grid[1]] for image in images]
        reads = cross_attention_mask(
            np.where(real, input_ids, -1), counts, image_token_id=config.image_token_id, max_tiles=tiles
        )
        if reads.shape[2] == 0:  # no row has an image
            reads = np.zeros((*input_ids.shape, 1, tiles), np.int64)
        tiled = TiledImages(
            pixel_values=pixels, aspect_ratio_ids=numbers, aspect_ratio_mask=there, cross_attention_mask=reads != 0
        )
        return tiled, None


def make_image_rows(config: VisionLanguageConfig, fields: Mapping[str, Any]) -> ImageRows:
    """Make the one of a model.

    Args:
        config: of the model.
        fields: of preprocessor_config.json, see `read_preprocessor`.

    Raises:
        CheckpointError: as `make_image_processor`.

    Example:
        >>> from PIL import Image
        >>> from smmd_jax.backbones import PRESETS
        >>> rows = make_image_rows(PRESETS["qwen2.5-vl-3b"], {})
        >>> rows.rooms(np.array([[84, 56], [0, 0]])).tolist(), rows.run(84, 56).count("<|image_pad|>")
        ([24, 0], 6)
    """
    process = make_image_processor(config.model_type, fields, config.vision)
    return (TiledRows if config.model_type == "mllama" else PatchedRows)(config=config, process=process)


def _check_count(row: int, found: int, given: int, config: VisionLanguageConfig, what: str) -> None:
    if found != given:
        raise ValueError(
            f"row {row} holds {found} image tokens (id {config.image_token_id}) and its image gives {given} {what}: "
            "wanted equal"
        )
