"""Images as Pixtral, the tower of Ministral 3, reads them: shrunk to a longest side, in rows that a break ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from smmd_jax.backbones.image_pixels import (
    ImageProcessor,
    ProcessedImages,
    by_row,
    check_same,
    processed,
    shared_fields,
)
from smmd_jax.backbones.vision import VisionConfig
from smmd_jax.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class PixtralImages(ImageProcessor):
    """Shrink to the longest side allowed, round up to whole features, and lay images of a batch into one array.

    Args:
        max_height, max_width: of an image, in pixels.
        cell: pixels along one side of a feature.
    """

    max_height: int
    max_width: int
    cell: int

    token: ClassVar[str] = "[IMG]"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], vision: VisionConfig) -> "PixtralImages":
        """Make one from the fields of preprocessor_config.json."""
        patch = fields.get("patch_size", vision.patch_size)
        check_same("patch_size", patch.get("height") if isinstance(patch, Mapping) else patch, vision.patch_size)
        size = fields.get("size", {"longest_edge": 1024})
        high, wide = (size.get(name) or size.get("longest_edge") for name in ("height", "width"))
        if not (high and wide):
            raise CheckpointError(f"size is {size}, wanted longest_edge, or height and width")
        cell = vision.patch_size * vision.merge_size
        return cls(max_height=high, max_width=wide, cell=cell, **shared_fields(cls, fields))

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to.

        Raises:
            ValueError: a side that shrinks to nothing.
        """
        ratio = max(height / self.max_height, width / self.max_width)
        high, wide = (height, width) if ratio <= 1 else (math.floor(height / ratio), math.floor(width / ratio))
        if not (high and wide):
            raise ValueError(
                f"an image of {width} x {height} pixels has no pixel left on one side when the other fits in "
                f"{self.max_width} x {self.max_height}: crop it"
            )
        return tuple(((side - 1) // self.cell + 1) * self.cell for side in (high, wide))

    @classmethod
    def sized(cls, fields: Mapping[str, Any], size: int) -> dict[str, Any]:
        return {**fields, "size": {"longest_edge": size}}

    def run(self, height: int, width: int) -> tuple[str, ...]:
        high, wide = self.target_size(height, width)
        return pixtral_run(high // self.cell, wide // self.cell)

    def _process(self, rows) -> ProcessedImages:
        images = [image for row in rows for image in row]
        sizes = [self.target_size(image.height, image.width) for image in images]
        pixels = np.zeros((len(images), 3, *np.max(sizes, axis=0)), np.float32)
        for target, image, (height, width) in zip(pixels, images, sizes, strict=True):
            target[:, :height, :width] = self.scale(self.resize(image, height, width))
        runs = by_row([self.run(image.height, image.width) for image in images], rows)
        return processed({"pixel_values": pixels, "image_sizes": np.array(sizes, np.int64)}, runs, self.token)


def pixtral_run(rows: int, columns: int) -> tuple[str, ...]:
    """Return the tokens of an image of rows x columns features: a break after each row, an end after the last.

    Example:
        >>> pixtral_run(2, 1)
        ('[IMG]', '[IMG_BREAK]', '[IMG]', '[IMG_END]')
    """
    row = ("[IMG]",) * columns
    return (*(*row, "[IMG_BREAK]") * (rows - 1), *row, "[IMG_END]")
