"""Images as Qwen2.5-VL reads them: both sides rounded to whole features within bounds on the area, cut into patches."""

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
from smmd_jax.backbones.images import patches_of
from smmd_jax.backbones.vision import VisionConfig
from smmd_jax.errors import CheckpointError

_MAX_RATIO = 200  # of the sides of an image, beyond which the processor of Hugging Face refuses too


@dataclass(frozen=True, kw_only=True)
class QwenImages(ImageProcessor):
    """Round both sides to whole features, within bounds on the area, and cut into patches, block by block.

    Args:
        min_pixels, max_pixels: bounds on height x width.
        patch, merge, frames: patch size, patches along one side of a feature, equal frames of a patch.
    """

    min_pixels: int
    max_pixels: int
    patch: int
    merge: int
    frames: int

    token: ClassVar[str] = "<|image_pad|>"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], vision: VisionConfig) -> "QwenImages":
        """Make one from the fields of preprocessor_config.json, with its bounds in either dialect."""
        for name, value in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.merge_size),
            ("temporal_patch_size", vision.temporal_size),
        ):
            check_same(name, fields.get(name, value), value)
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280} | (fields.get("size") or {})
        low, high = (
            size[edge] if fields.get(name) is None else fields[name]
            for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        )
        if not 0 < low <= high:
            raise CheckpointError(f"min_pixels is {low} and max_pixels {high}, wanted 0 < min_pixels <= max_pixels")
        return cls(
            min_pixels=low, max_pixels=high, patch=vision.patch_size, merge=vision.merge_size,
            frames=vision.temporal_size, **shared_fields(cls, fields),
        )  # fmt: skip

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is resized to.

        Raises:
            ValueError: one side more than 200 times the other.
        """
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise ValueError(
                f"an image has {width} x {height} pixels, wanted no side above {_MAX_RATIO} times the other: crop it"
            )
        cell = self.patch * self.merge
        # Python's round, halves to the even number, is part of what the model was trained with.
        rounded = round(height / cell) * cell, round(width / cell) * cell
        area = rounded[0] * rounded[1]
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            return tuple(max(cell, math.floor(side / shrink / cell) * cell) for side in (height, width))
        if area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return tuple(math.ceil(side * grow / cell) * cell for side in (height, width))
        return rounded

    @classmethod
    def sized(cls, fields: Mapping[str, Any], size: int) -> dict[str, Any]:
        area = {"min_pixels": size * size, "max_pixels": size * size}
        return {**fields, **area, "size": {"shortest_edge": size * size, "longest_edge": size * size}}

    def run(self, height: int, width: int) -> tuple[str, ...]:
        high, wide = self.target_size(height, width)
        count = high * wide // (self.patch * self.merge) ** 2
        return ("<|vision_start|>", *("<|image_pad|>",) * count, "<|vision_end|>")

    def _process(self, rows) -> ProcessedImages:
        patches, grids = [], []
        for image in (image for row in rows for image in row):
            height, width = self.target_size(image.height, image.width)
            cut = patches_of(self.scale(self.resize(image, height, width)), self.patch, self.merge)
            cut = cut.reshape(len(cut), 3, 1, -1)
            patches.append(np.repeat(cut, self.frames, axis=2).reshape(len(cut), -1))
            grids.append((1, height // self.patch, width // self.patch))
        runs = by_row([self.run(image.height, image.width) for row in rows for image in row], rows)
        arrays = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, np.int64)}
        return processed(arrays, runs, self.token)
