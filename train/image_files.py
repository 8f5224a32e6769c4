"""Encoded images of a data set: whole ones become upright RGB pictures, everything else is refused with its reason."""

import io
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin

from train.exits import DataError

MAX_PIXELS = 2**25  # 33.5 million: a photo of most phones, and 100 MB once decoded

# Named by their first bytes and opened by the class itself: `Image.open` also asks dozens of other readers, some of
# which start programs, and warns of large images where they are refused here.
_READERS: Mapping[str, tuple[tuple[bytes, ...], Callable[[io.BytesIO], ImageFile.ImageFile]]] = MappingProxyType(
    {
        "PNG": ((b"\x89PNG\r\n\x1a\n",), PngImagePlugin.PngImageFile),
        "JPEG": ((b"\xff\xd8\xff",), JpegImagePlugin.jpeg_factory),
        "GIF": ((b"GIF87a", b"GIF89a"), GifImagePlugin.GifImageFile),
        "BMP": ((b"BM",), BmpImagePlugin.BmpImageFile),
    }
)
_TURNS = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)
_ORIENTATION = 0x0112
_WHITE = (255, 255, 255, 255)


class ImageError(DataError):
    """Bytes that are no image which a model may be shown.

    Attributes:
      reason: the kind of fault in a few words, the same for every image that has it: what counts are kept by.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode a PNG, JPEG, GIF or BMP file into an upright picture in RGB.

    What is transparent lies on white; CMYK becomes RGB; 16 bits a channel become 8, 65535 being 255; a photo is turned
    as its EXIF entry says, and stays as it is stored where that entry is unreadable. Of the several pictures that a
    phone puts into one JPEG file (MPO) the first is the photo; an animation has no such first, so it is refused.

    Args:
      data: the whole file.
      max_pixels: refuse more, by the file's header and before anything is decoded, so memory stays within a small
        multiple of this.

    Raises:
      ImageError: with reason "empty image", "no image of a known format", "too many pixels", "animated image" or
        "truncated or broken image".

    Example:
      >>> stream = io.BytesIO()
      >>> Image.new("LA", (3, 2), (0, 0)).save(stream, "PNG")
      >>> image = read_image(stream.getvalue())
      >>> image.mode, image.size, image.getpixel((0, 0))
      ('RGB', (3, 2), (255, 255, 255))
    """
    image, form = _open(data)
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            "too many pixels",
            f"an image of {width:,} x {height:,} pixels is larger than the {max_pixels:,} that may be decoded: make it "
            "smaller first.",
        )
    if form != "JPEG":
        _check_still(image, form)
    try:
        image.load()
        image = _to_rgb(image)
    except Exception as error:  # the readers raise whatever a broken file makes of them
        raise _broken(data, form, error) from error
    turn = _TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _open(data: bytes) -> tuple[ImageFile.ImageFile, str]:
    """Read the header alone; returns the image, not decoded yet, and the name of its format."""
    if not data:
        raise ImageError("empty image", "an image file of 0 bytes holds no picture.")
    form = next((name for name, (starts, _) in _READERS.items() if data.startswith(starts)), None)
    if form is None:
        raise ImageError(
            "no image of a known format",
            f"{len(data):,} bytes that begin with {data[:8]!r} are no {', '.join(_READERS)} file, whatever its name "
            "says: convert it to one of these.",
        )
    try:
        image = _READERS[form][1](io.BytesIO(data))
        if min(image.size) < 1:
            raise ValueError(f"{image.width} x {image.height} pixels")
    except Image.DecompressionBombError as error:
        raise ImageError("too many pixels", f"an image is too large to be decoded: {error}.") from error
    except Exception as error:
        raise _broken(data, form, error) from error
    return image, form


def _check_still(image: Any, form: str) -> None:
    try:
        is_animated = getattr(image, "is_animated", False)
    except Exception as error:
        raise ImageError(
            "truncated or broken image", f"the frames of a {form} file cannot be told: {error}."
        ) from error
    if is_animated:
        raise ImageError(
            "animated image", f"a {form} file holds an animation, and which frame is meant is not known: save the one."
        )


def _broken(data: bytes, form: str, error: Exception) -> ImageError:
    return ImageError(
        "truncated or broken image", f"{len(data):,} bytes of a {form} file are no whole picture: {error}."
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert the pixels; what EXIF says stays with the image."""
    info = image.info
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    if "A" in image.getbands() or "a" in image.getbands() or info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    image = image.convert("RGB")
    image.info = info
    return image


def _from_16_bits(image: Image.Image) -> Image.Image:
    """255 v / 65535, rounded; Pillow's own conversion cuts at 255."""
    values = np.asarray(image).astype(np.int64)
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is None:
        return grey
    grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken entry says nothing, and the picture itself is whole
        return 1
