"""Images of examples: read and measured when they are encoded, prepared when a batch needs them, and then kept."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from PIL import Image

from smmd_jax.backbones.image_rows import ImageRows, PreparedImage
from train.exits import DataError
from train.image_files import ImageError, read_image
from train.tasks.base import Example, Source

# Of prepared images in memory: small ones are prepared once a run, large ones again whenever they are needed.
_KEPT_BYTES = 2**28


def read_picture(example: Example) -> Image.Image:
    """Decode the image of an example.

    Raises:
      ImageError: it is no whole picture; the message names the example.
    """
    try:
        return read_image(example.image)
    except ImageError as error:
        raise ImageError(error.reason, f"Example {example.key}: {error}") from error


def image_run(example: Example, images: ImageRows | None) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Return the height and width of an example's image, and the special tokens that it is in the prompt.

    (0, 0) and no tokens where the example is text alone.

    Args:
      images: how the backbone reads images; None: it does not.

    Raises:
      DataError: an image for a backbone that reads text alone.
      ImageError: no whole picture, or one that the backbone cannot scale.
    """
    if example.image is None:
        return (0, 0), ()
    if images is None:
        raise DataError(
            f"Example {example.key} has an image, and the backbone reads text alone: choose a backbone with vision, or "
            "data without images."
        )
    picture = read_picture(example)
    try:
        return (picture.height, picture.width), images.run(picture.height, picture.width)
    except ValueError as error:
        raise ImageError("sides that cannot be scaled", f"Example {example.key}: {error}") from error


class Pictures:
    """The images of encoded examples, read from their source one by one.

    Args:
      source: of the examples.
      images: how the backbone reads images.
      places: [n] where each example stands in the source.
      sizes: [n, 2] height and width of its image; 0 and 0: it has none.
      kept_bytes: prepared images that stay in memory, those first that come first.

    Attributes:
      rooms: [n] int32, see `ImageRows.rooms`; 0: no image.
    """

    def __init__(
        self,
        source: Source,
        images: ImageRows,
        *,
        places: Int[np.ndarray, "n"],
        sizes: Int[np.ndarray, "n 2"],
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        self._source, self._images, self._places, self._sizes = source, images, places, sizes
        self._kept: dict[int, PreparedImage] = {}
        self._left = kept_bytes
        self.rooms = images.rooms(sizes)

    def lay_out(
        self,
        input_ids: Int[np.ndarray, "B T"],
        real: Bool[np.ndarray, "B T"],
        examples: Sequence[int | None],
        *,
        room: int,
    ) -> tuple[Any, Int[np.ndarray, "B 3 T"] | None]:
        """Return what a model takes beside the tokens of a batch, see `ImageRows.lay_out`.

        Args:
          examples: per row the number of the example whose image it holds, or None.
          room: of the batch, at least the largest of the examples'.

        Raises:
          DataError: an image that is not what it was when it was encoded.
        """
        prepared = [None if index is None or not self.rooms[index] else self._prepared(index) for index in examples]
        try:
            return self._images.lay_out(input_ids, real, prepared, room=room)
        except ValueError as error:
            raise DataError(f"The images are not those that were encoded: {error}.") from error

    def _prepared(self, index: int) -> PreparedImage:
        if index in self._kept:
            return self._kept[index]
        example = self._source[int(self._places[index])]
        picture = read_picture(example)
        if (picture.height, picture.width) != tuple(self._sizes[index]):
            raise DataError(
                f"Example {example.key} has an image of {picture.width} x {picture.height} pixels, and had one of "
                f"{self._sizes[index, 1]} x {self._sizes[index, 0]} when it was encoded: the data have changed."
            )
        found = self._images.prepare(picture)
        if found.pixels.nbytes <= self._left:
            self._left -= found.pixels.nbytes
            self._kept[index] = found
        return found
