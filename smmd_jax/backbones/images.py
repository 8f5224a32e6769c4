"""Images as a vision tower reads them: patches in blocks, where each lies, and which token each feature replaces."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# Lengths that an image's patches are padded to: a data set compiles a handful of programs, not one per size.
_BUCKETS = tuple(size for step in range(4, 16) for size in (1 << step, 3 << (step - 1)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PatchedImages:
    """Hold the images of B rows, at most I a row and L patches each; M x M patches together become one feature.

    Every array has the rows first, and nothing in a row points into another one: a batch may be cut, and laid over
    devices, by rows. A row with fewer than I images has empty ones.

    Args:
        patches: float [B, I, L, K], the numbers of a patch in the order of the tower's first matrix; patches of a
            feature stand together.
        rows, columns: int32 [B, I, L], where a patch lies in its image, counted in patches.
        windows: int32 [B, I, L], which window of the image a patch belongs to.
        real: bool [B, I, L]; padding is False.
        order: int32 [B, I * L / M^2], which of the cells of the row's images are features: those of its first image,
            then those of its second one, and so on without padding; -1 beyond them.
    """

    patches: Float[Array, "*images L K"]
    rows: Int[Array, "*images L"]
    columns: Int[Array, "*images L"]
    windows: Int[Array, "*images L"]
    real: Bool[Array, "*images L"]
    order: Int[Array, "*rows cells"]

    def flattened(self) -> "PatchedImages":
        """Return the images of all rows along one axis [B * I, L, ...], as a tower reads them."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self)


def bucket_length(patches: int, *, multiple: int) -> int:
    """Return the smallest bucket that holds so many patches and is a multiple of `multiple`.

    Buckets are 16, 24, 32, 48, 64, 96, ...: at most a third of the patches is padding.

    Example:
        >>> bucket_length(40, multiple=4)
        48
    """
    fitting = (size for size in _BUCKETS if size >= patches and size % multiple == 0)
    return next(fitting, -(-patches // multiple) * multiple)


def pack_images(
    images: Sequence[Sequence[Float[np.ndarray, "patches K"]]],
    grids: Sequence[Sequence[tuple[int, int]]],
    *,
    numbers: int,
    merge: int,
    window: int | None = None,
    length: int | None = None,
) -> PatchedImages:
    """Lay images of different sizes into one array, with every table made here, on the host.

    Args:
        images: per row of the batch and image its patches in blocks: the merge x merge patches of a block follow one
            another, row by row within it, and the blocks go row by row over the image.
        grids: per row and image its rows and columns of patches, multiples of `merge`.
        numbers: K, of a patch.
        merge: patches along one side of a block.
        window: blocks along one side of a window; None: the whole image is one.
        length: patches that every image is padded to; None: the bucket of the largest.

    Raises:
        ValueError: a grid that is no multiple of `merge`, patches that do not fill their grid, a length that is too
            short.
    """
    for number, (patches, (high, wide)) in enumerate(zip(_flat(images), _flat(grids), strict=True)):
        if high % merge or wide % merge or high < 1 or wide < 1:
            raise ValueError(f"image {number} has {high} x {wide} patches, wanted multiples of {merge}")
        if patches.shape != (high * wide, numbers):
            raise ValueError(
                f"image {number} has {len(patches)} patches of {patches.shape[1]} numbers for a grid of {high} x "
                f"{wide} with {numbers}"
            )
    longest, cell = max(map(len, _flat(images)), default=0), merge * merge
    length = bucket_length(longest, multiple=cell) if length is None else length
    if length < longest or length % cell:
        raise ValueError(f"length is {length}, wanted a multiple of {cell} and at least {longest}")
    count, cells = max(1, *map(len, images)), length // cell
    packed = np.zeros((len(images), count, length, numbers), np.float32)
    tables = np.zeros((3, len(images), count, length), np.int32)
    real = np.zeros((len(images), count, length), bool)
    order = np.full((len(images), count * cells), -1, np.int32)
    for row, (own, sizes) in enumerate(zip(images, grids, strict=True)):
        used = 0
        for number, (patches, grid) in enumerate(zip(own, sizes, strict=True)):
            size = len(patches)
            packed[row, number, :size], real[row, number, :size] = patches, True
            tables[:, row, number, :size] = _tables(*grid, merge, window)
            order[row, used : used + size // cell] = number * cells + np.arange(size // cell)
            used += size // cell
    return PatchedImages(
        patches=packed, rows=tables[0], columns=tables[1], windows=tables[2], real=real, order=order
    )


def _flat(rows: Sequence[Sequence]) -> list:
    return [each for row in rows for each in row]


@functools.lru_cache(maxsize=1024)
def _tables(rows: int, columns: int, merge: int, window: int | None) -> np.ndarray:
    """Row, column and window of each patch, in the order of the blocks."""
    grid = np.indices((rows, columns))
    row, column = (in_blocks(axis, merge).reshape(-1) for axis in grid)
    if window is None:
        return np.stack([row, column, np.zeros_like(row)])
    side = window * merge
    across = math.ceil(columns / side)
    return np.stack([row, column, row // side * across + column // side])


def in_blocks(grid: np.ndarray, merge: int) -> np.ndarray:
    """Reorder [rows, columns, ...] to [blocks, merge * merge, ...].

    Example:
        >>> in_blocks(np.arange(8).reshape(2, 4), 2).tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    rows, columns, *rest = grid.shape
    blocks = grid.reshape(rows // merge, merge, columns // merge, merge, *rest)
    return np.swapaxes(blocks, 1, 2).reshape(-1, merge * merge, *rest)


def patches_of(pixels: Float[np.ndarray, "channels H W"], patch: int, merge: int) -> Float[np.ndarray, "patches K"]:
    """Cut one image into patches, in blocks; the numbers of a patch go channel by channel, row by row.

    Raises:
        ValueError: sides that are no multiples of patch x merge.
    """
    channels, height, width = pixels.shape
    if height % (patch * merge) or width % (patch * merge):
        raise ValueError(f"an image is {height} x {width} pixels, wanted multiples of {patch * merge}")
    cut = pixels.reshape(channels, height // patch, patch, width // patch, patch)
    return in_blocks(cut.transpose(1, 3, 0, 2, 4), merge).reshape(-1, channels * patch * patch)


def named_arrays(images: Mapping[str, Any], **wanted: str) -> list[np.ndarray]:
    """Return the arrays of these names on the host, and refuse any other.

    Args:
        images: what a processor returned.
        wanted: name -> kind and axes, as "float I 3 H W" or "int I 2"; a number is the length of its axis.

    Raises:
        ValueError: unknown or missing names, other axes, numbers that are not finite or negative integers.
        TypeError: no mapping of names, or an array of another kind.
    """
    if not isinstance(images, Mapping) or not all(isinstance(name, str) for name in images):
        raise TypeError(f"images is {type(images).__name__}, wanted a dict of arrays: {', '.join(wanted)}")
    if set(images) != set(wanted):
        raise ValueError(f"images hold {', '.join(sorted(images)) or 'nothing'}, wanted {', '.join(wanted)}")
    return [_host_array(name, images[name], *form.split()) for name, form in wanted.items()]


def _host_array(name: str, value: Any, kind: str, *axes: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} is ragged, wanted an array [{', '.join(axes)}]") from error
    fits = array.ndim == len(axes) and all(
        not axis.isdigit() or int(axis) == length for axis, length in zip(axes, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {list(array.shape)}, wanted [{', '.join(axes)}]")
    if kind == "int":
        if array.dtype != bool and not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"{name} is {array.dtype}, wanted integers")
        if (array < 0).any() or (array > np.iinfo(np.int32).max).any():
            raise ValueError(f"{name} holds {array.min()} to {array.max()}, wanted non-negative 32-bit integers")
        return array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} is {array.dtype}, wanted the floating point numbers of an image processor")
    if not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"{name} holds NaN or infinity: the image was not read")
    return array


def deal_images(input_ids: np.ndarray, image_token_id: int, features: Sequence[int]) -> list[range]:
    """Say which images belong to each row, by the image tokens that it holds.

    Args:
        input_ids: [B, T].
        image_token_id: of the token that a feature takes the place of.
        features: how many each image gives, in the order of the prompts.

    Returns:
        Per row the numbers of its images.

    Raises:
        ValueError: image tokens that are not as many as the features, in all or in a row; the message has both numbers.

    Example:
        >>> deal_images(np.array([[9, 9, 1], [1, 2, 3], [9, 9, 9]]), 9, [2, 2, 1])
        [range(0, 1), range(1, 1), range(1, 3)]
    """
    found = (np.asarray(input_ids) == image_token_id).sum(1).tolist()
    if sum(found) != sum(features):
        raise ValueError(
            f"the prompts hold {sum(found)} image tokens (id {image_token_id}) and the images give {sum(features)} "
            "features: write one image token per feature"
        )
    dealt, first = [], 0
    for row, count in enumerate(found):
        end, given = first, 0
        while given < count:
            given, end = given + features[end], end + 1
        if given != count:
            raise ValueError(
                f"row {row} holds {count} image tokens (id {image_token_id}) and its images give {given} features: "
                "write one image token per feature"
            )
        dealt.append(range(first, end))
        first = end
    return dealt


def place_features(
    embeddings: Float[Array, "B T D"],
    input_ids: Int[Array, "B T"],
    image_token_id: int,
    features: Float[Array, "B cells D"],
    order: Int[Array, "B cells"],
) -> Float[Array, "B T D"]:
    """Put the features of each row in place of its image tokens, in the order in which both come."""

    def of_row(embeddings, is_image, features, order):
        slot = jnp.cumsum(is_image) - 1
        # An image token too many takes -1 from the order, and that reads NaN: more loud than another image's feature.
        taken = order.at[jnp.where(is_image, slot, 0)].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
        rows = features.at[taken].get(mode="fill", fill_value=np.nan, wrap_negative_indices=False)
        return jnp.where(is_image[:, None], rows.astype(embeddings.dtype), embeddings)

    return jax.vmap(of_row)(embeddings, input_ids == image_token_id, features, order)
