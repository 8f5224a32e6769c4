"""What the image processors share: images opened in RGB, resized and scaled as those of Hugging Face; needs Pillow."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps

from smmd_jax.errors import CheckpointError

ImageInput = Image.Image | bytes
Rows = Sequence[Sequence[ImageInput]]

_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


@dataclass(frozen=True, kw_only=True)
class ProcessedImages:
    """Hold what a processor makes of the images of a batch.

    Attributes:
        arrays: what a model takes as `images`, by the names of Hugging Face; for mllama all but cross_attention_mask,
            which needs the tokens (see `cross_attention_mask`).
        runs: per row and image the special tokens that stand for it in the prompt.
        image_tokens: per row and image how many of these are image tokens.
        tiles: per row and image its tiles; 1 where the family has none.
    """

    arrays: dict[str, np.ndarray]
    runs: tuple[tuple[tuple[str, ...], ...], ...]
    image_tokens: tuple[tuple[int, ...], ...]
    tiles: tuple[tuple[int, ...], ...]


def open_image(image: ImageInput) -> Image.Image:
    """Return an image in RGB; what is transparent lies on white.

    Encoded bytes are turned upright as their EXIF entry says. An image that is open already is taken as it is.

    Raises:
        ValueError: bytes that are no whole image, or one without a pixel.
        TypeError: neither an image nor bytes.

    Example:
        >>> open_image(Image.new("LA", (3, 2), (0, 0))).getpixel((0, 0))
        (255, 255, 255)
    """
    if isinstance(image, bytes | bytearray | memoryview):
        try:
            opened = Image.open(io.BytesIO(image))
            opened.load()
            image = ImageOps.exif_transpose(opened)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"these {len(image)} bytes are no image that can be read: {error}") from error
    elif not isinstance(image, Image.Image):
        raise TypeError(f"an image is a {type(image).__name__}, wanted a PIL image or the bytes of an image file")
    if min(image.size) < 1:
        raise ValueError(f"an image has {image.width} x {image.height} pixels, wanted at least one")
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """What the processors share: pixels = (resized * factor - mean) / std, in float32, channel by channel.

    Args:
        resample: Pillow's number of the filter.
        factor: on the grey levels 0 to 255.
        mean, std: per channel.
    """

    resample: int
    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    # What stands for a feature (mllama: for an image) in a prompt.
    token: ClassVar[str]
    # Where preprocessor_config.json is silent.
    default_resample: ClassVar[int] = Image.Resampling.BICUBIC
    default_scale: ClassVar[tuple] = _CLIP

    def __call__(self, rows: Rows) -> ProcessedImages:
        """Return the arrays and the prompts' tokens of the images of a batch.

        Args:
            rows: per row of the batch its images, in the order in which its prompt names them.

        Raises:
            ValueError, TypeError: no image at all, one that cannot be read or resized.
        """
        opened = [[open_image(image) for image in row] for row in rows]
        if not any(opened):
            raise ValueError("got no images: leave images out")
        return self._process(opened)

    def run(self, height: int, width: int) -> tuple[str, ...]:
        """Return the special tokens that stand for an image of this size in a prompt; no pixel is needed.

        Raises:
            ValueError: a size that cannot be resized.
        """
        raise NotImplementedError  # each family counts in its own way

    @classmethod
    def sized(cls, fields: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Return fields of preprocessor_config.json that scale images into a square of so many pixels, or to its area.

        Raises:
            ValueError: a family whose images have one size.
        """
        raise ValueError(f"image_size is {size}, and the tower reads tiles of one size: leave it out")

    def _process(self, rows: Sequence[Sequence[Image.Image]]) -> ProcessedImages:
        raise NotImplementedError  # each family cuts in its own way

    def resize(self, image: Image.Image, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """Return the grey levels of an image in another size."""
        return np.asarray(image.resize((width, height), resample=self.resample))

    def scale(self, levels: UInt8[np.ndarray, "height width 3"]) -> Float[np.ndarray, "3 height width"]:
        """Return what a tower reads of grey levels."""
        # The product is rounded once, from float64: the last bit depends on it.
        numbers = (levels.astype(np.float64) * self.factor).astype(np.float32)
        scaled = (numbers - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def shared_fields(cls: type[ImageProcessor], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what every processor takes from preprocessor_config.json.

    Raises:
        CheckpointError: a choice that no processor has; the message names field and value.
    """
    for name, wanted in (("do_resize", True), ("do_center_crop", None)):
        if (fields.get(name, wanted) or None) != wanted:
            raise CheckpointError(f"{name} is {fields[name]}, and images are always resized and never cropped")
    resample = fields.get("resample", int(cls.default_resample))
    if resample not in {int(known) for known in Image.Resampling}:
        raise CheckpointError(f"resample is {resample!r}, wanted one of Pillow's filters, 0 to 5")
    mean, std = (
        tuple(fields.get(name) or default)
        for name, default in zip(("image_mean", "image_std"), cls.default_scale, strict=True)
    )
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise CheckpointError(f"image_mean is {mean} and image_std {std}, wanted three each, and std above 0")
    if not fields.get("do_normalize", True):
        mean, std = (0.0,) * 3, (1.0,) * 3
    factor = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0
    return {"resample": resample, "factor": factor, "mean": mean, "std": std}


def check_same(name: str, found: Any, wanted: int) -> None:
    """Refuse a processor that prepares images for another tower."""
    if found != wanted:
        raise CheckpointError(f"{name} is {found} in preprocessor_config.json and {wanted} in the tower: wanted equal")


def by_row(flat: list, rows: Sequence[Sequence]) -> list[list]:
    """Deal what belongs to the images of a batch, one after another, to their rows."""
    found = iter(flat)
    return [[next(found) for _ in row] for row in rows]


def processed(arrays: dict[str, np.ndarray], runs: list, token: str, tiles: list | None = None) -> ProcessedImages:
    """Put together what a processor returns; `token` is the image token among those of the runs."""
    runs = tuple(map(tuple, runs))
    return ProcessedImages(
        arrays=arrays,
        runs=runs,
        image_tokens=tuple(tuple(run.count(token) for run in row) for row in runs),
        tiles=tuple(tuple(1 for _ in row) for row in runs) if tiles is None else tuple(map(tuple, tiles)),
    )
