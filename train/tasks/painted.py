"""What painted data share: text on a canvas, PNG files, and pictures that no two splits can share."""

import functools
import hashlib
import io
import math
import random
from collections.abc import Callable
from typing import TypeVar

from PIL import Image, ImageDraw, ImageFont

Content = TypeVar("Content")

_BUCKETS = 4


def paint_for_split(
    paint: Callable[[random.Random], tuple[Content, Image.Image]], *, name: str, split: str
) -> tuple[Content, bytes]:
    """Paint until a picture belongs to a split; returns what it shows, and the picture as a PNG file.

    Args:
      paint: draws and paints with a generator: gives (content, picture).
      name: seeds the generator, and so decides the picture.
      split: "train" or "test", see `split_of_picture`.
    """
    rng = random.Random(name)
    while True:
        content, image = paint(rng)
        if split_of_picture(image.convert("RGB").tobytes()) == split:
            break
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return content, stream.getvalue()


def split_of_picture(pixels: bytes) -> str:
    """Say to which split a picture belongs, by a hash of its pixels in RGB: one in four is for the test.

    So no picture is in both splits, whatever the seeds and sizes.

    Example:
      >>> {split_of_picture(bytes([level] * 12)) for level in range(99)} == {"train", "test"}
      True
    """
    return "train" if hashlib.blake2b(pixels, digest_size=8).digest()[0] % _BUCKETS else "test"


@functools.lru_cache(maxsize=4096)
def text_mask(text: str, height: int, turn: float = 0.0) -> Image.Image:
    """Give a text in white on black, in Pillow's own font, cut to its ink and turned clockwise.

    Args:
      text: one line.
      height: size of the font in pixels.
      turn: in degrees.

    Example:
      >>> text_mask("12", 20).mode
      'L'
    """
    font = ImageFont.load_default(height)
    left, top, right, bottom = font.getbbox(text)
    mask = Image.new("L", (math.ceil(right - left), math.ceil(bottom - top)))
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font)
    return mask.rotate(-turn, resample=Image.Resampling.BICUBIC, expand=True) if turn else mask


def paste_text(
    canvas: Image.Image, mask: Image.Image, place: tuple[float, float], colour: tuple[int, int, int] | int
) -> None:
    """Lay a `text_mask` on a canvas, its middle at a place."""
    left, top = round(place[0] - mask.width / 2), round(place[1] - mask.height / 2)
    canvas.paste(colour, (left, top, left + mask.width, top + mask.height), mask)
